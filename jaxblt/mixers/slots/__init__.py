"""Engines whose state is a set of slots (PULSE)."""
