"""Products of gates over stretches of a chunk, none of them above 1.

Between two steps of a chunk lies the middle of one block of 2, 4, 8 ... steps that holds both, one in each half. The
decay from j to i is then exp(sum from j to the middle) exp(sum from the middle to i), both at most 1. Each sum is over
the steps it is made of. A difference of two sums from the chunk's start would lose small gates beside large ones, and
exp(-sum) overflows.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

TIME = 3
"""Axis of the steps in [N, B, H, C, ...]."""

Sums = list[tuple[Array, Array]]
"""Sums by blocks of 1, 2, 4 ... C steps: from a block's start up to each step, and from behind it to its end."""


def split_halves(x: Float[Array, "N B H C ..."], size: int) -> tuple[Array, Array]:
    """Split blocks of 2 `size` steps into halves, [N, B, H, M, size, ...] each."""
    x = x.reshape(*x.shape[:TIME], -1, 2, size, *x.shape[TIME + 1 :])
    return x[:, :, :, :, 0], x[:, :, :, :, 1]


def join_halves(first: Float[Array, "N B H M S ..."], second: Float[Array, "N B H M S ..."]) -> Array:
    """Undo `split_halves`."""
    x = jnp.stack([first, second], TIME + 1)
    return x.reshape(*x.shape[:TIME], -1, *x.shape[TIME + 3 :])


def sum_gates(log_gate: Float[Array, "N B H C ..."]) -> Sums:
    """Sum log gates inside blocks of 1, 2, 4 ... C steps; C is a power of two."""
    prefix, suffix = log_gate, jnp.zeros_like(log_gate)
    sums, size = [(prefix, suffix)], 1
    while size < log_gate.shape[TIME]:
        (before, after), (first, second) = split_halves(prefix, size), split_halves(suffix, size)
        prefix = join_halves(before, after + before[:, :, :, :, -1:])
        suffix = join_halves(first + after[:, :, :, :, -1:], second)
        sums.append((prefix, suffix))
        size *= 2
    return sums


def pair_decays(sums: Sums) -> Float[Array, "N B H G C C"]:
    """Return exp(sum of log gates behind j up to i) at [i, j]; 1 on the diagonal.

    Above the diagonal it is 1 too, and unused.

    Args:
      sums: of gates [N, B, H, C, G].
    """
    turned = [tuple(jnp.moveaxis(x, TIME, -1) for x in pair) for pair in sums]
    shape, dtype = turned[0][0].shape, turned[0][0].dtype
    places, total = np.arange(shape[-1]), jnp.zeros((*shape, shape[-1]), dtype)
    for level, (prefix, suffix) in enumerate(turned[:-1]):
        half = places >> level
        apart = (half[:, None] == half + 1) & (half % 2 == 0)
        found = prefix[..., :, None] + suffix[..., None, :]
        total = jnp.where(apart.reshape(*(1,) * (len(shape) - 1), *apart.shape), found, total)
    return jnp.exp(total)
