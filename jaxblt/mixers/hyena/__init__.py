"""Hyena: gated long convolutions with explicit, implicit and modal filters."""
