"""Optimisers of recipes and their learning rates, by optax."""
