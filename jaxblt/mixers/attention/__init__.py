"""Attention over whole, cached and split rows, and rotary positions."""
