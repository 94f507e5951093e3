"""Norms of gradients by layer, for a log that says where a training goes wrong."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.training.metrics import Metrics

PERIODS = "periods"
"""Part of a path whose parameters are stacked by period of a scanned stack."""


def layer_norms(grads: Any) -> Metrics:
    """Return norms by layer as "grad_norm/PATH": of each block, and of each part of the model without blocks.

    Blocks of a scanned stack have one norm a period, in a vector. Squares of all of them sum to the square of the
    gradient's norm. A norm that is not finite names the layer whose gradient is not.
    """
    squares: Metrics = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        names = [str(getattr(entry, "key", entry)) for entry in path]
        first = 1 if PERIODS in names else 0
        square = jnp.sum(jnp.square(leaf.astype(jnp.float32)), range(first, leaf.ndim))
        layer = _layer_of(names)
        squares[layer] = squares.get(layer, jnp.zeros_like(square)) + square
    return {f"grad_norm/{layer}": jnp.sqrt(square) for layer, square in squares.items()}


def _layer_of(names: list[str]) -> str:
    """Return the path of the block that holds a parameter, or of the model's part."""
    ends = [i + 1 for i, name in enumerate(names) if name.startswith("block_")]
    return "/".join(names[: ends[0] if ends else 1])
