"""Products within a chunk under gates that differ between channels: block by block, halves against halves.

In each block of 2, 4, 8 ... C steps the second half reads what the first half wrote. Both carry their decay to or from
the block's middle, so every factor is at most 1.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._linear_state.decays import Sums, join_halves, split_halves
from pallas_kernels._linear_state.products import product


def score_under_key_gates(
    q: Float[Array, "N B H C K"], k: Float[Array, "N B H C K"], sums: Sums, dtype: Any
) -> Float[Array, "N B H C C"]:
    """Return scores under gates of key channels for j <= i, zero above.

    They are sum_k q_ik k_jk exp(sum of gate k over the steps behind j up to i).
    """
    scores = jnp.sum(q * k, -1)[..., None, None]
    for level, (prefix, suffix) in enumerate(sums[:-1]):
        size = 1 << level
        reading = split_halves(q, size)[1] * jnp.exp(split_halves(prefix, size)[1])
        written = split_halves(k, size)[0] * jnp.exp(split_halves(suffix, size)[0])
        lower = product("nbhmik,nbhmjk->nbhmij", reading, written, dtype)
        first, second = scores[:, :, :, 0::2], scores[:, :, :, 1::2]
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        scores = jnp.concatenate([above, jnp.concatenate([lower, second], -1)], -2)
    return scores[:, :, :, 0]


def read_under_value_gates(
    scores: Float[Array, "N B H C C"], v: Float[Array, "N B H C G V"], sums: Sums, dtype: Any
) -> Float[Array, "N B H C G V"]:
    """Return reads under gates of value channels.

    They are sum_{j <= i} scores_ij v_jv exp(sum of gate v over the steps behind j up to i).
    """
    blocks, o = scores[:, :, :, None], jnp.zeros_like(v)
    for level in reversed(range(len(sums) - 1)):
        size, (prefix, suffix) = 1 << level, sums[level]
        written = split_halves(v, size)[0] * jnp.exp(split_halves(suffix, size)[0])
        lower = blocks[..., size:, :size]
        read = product("nbhmij,nbhmjgv->nbhmigv", lower, written, dtype)
        read = read * jnp.exp(split_halves(prefix, size)[1])
        o = o + join_halves(jnp.zeros_like(read), read)
        halves = jnp.stack([blocks[..., :size, :size], blocks[..., size:, size:]], 4)
        blocks = halves.reshape(*scores.shape[:3], -1, size, size)
    return o + blocks[..., 0, 0][..., None, None] * v
