"""The norm of a tree, and gradients clipped to one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def global_norm(tree: Any) -> Float[Array, ""]:
    """Return the root of the sum of squares of all entries.

    On one device each array in fp32 is summed but for its first axis, which the pass that makes it can do, and one more
    kernel adds up the rest: `optax.tree.norm` takes a kernel an array for that. Devices that share arrays would have
    to exchange such sums.
    """
    leaves, devices = jax.tree.leaves(tree), math.prod(jax.sharding.get_abstract_mesh().axis_sizes)
    if not leaves or devices > 1 or any(leaf.dtype != jnp.float32 for leaf in leaves):
        return optax.tree.norm(tree)
    squares = [jnp.square(leaf) for leaf in leaves]
    parts = [
        jnp.sum(square, range(1, square.ndim)) if square.ndim > 1 else square.reshape(-1)
        for square in squares
    ]
    # XLA would sum each part by itself, and then the sums
    return jnp.sqrt(jnp.sum(jax.lax.optimization_barrier(jnp.concatenate(parts))))


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Cut gradients to a global norm, as `optax.clip_by_global_norm` does."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = global_norm(updates)
        is_small = norm < most
        cut = lambda x: jax.lax.select(is_small, x, (x / norm.astype(x.dtype)) * most)  # noqa: E731
        return jax.tree.map(cut, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
