"""What counts at a step of a packed row, as bits: the Triton kernels load one integer a step and no segment ids."""

import jax.numpy as jnp
from jaxtyping import Array, Int

AHEAD = 7
"""The place of lag k ahead is AHEAD + k; those of lags behind are 1 to AHEAD, for at most AHEAD + 1 taps."""


def reach(ids: Int[Array, "*rows T"], taps: int, *, history: bool) -> Int[Array, "*rows T"]:
    """int16 with, from the lowest bit on: t is a token; t - k is of its document, for k = 1 to 7; t + k is.

    A hole and padding have no bit, and are of no token's document. Steps before the first are of its document where
    there is a history, and of none otherwise.
    """
    before = jnp.abs(ids[..., :1]) if history else jnp.zeros_like(ids[..., :1])
    behind = jnp.concatenate([jnp.repeat(before, taps - 1, axis=-1), ids], axis=-1)
    ahead = jnp.concatenate([ids, jnp.zeros_like(behind[..., : taps - 1])], axis=-1)
    length = ids.shape[-1]
    bits = jnp.ones(ids.shape, jnp.int32)
    for lag in range(1, taps):
        back = taps - 1 - lag
        bits |= (behind[..., back : back + length] == ids).astype(jnp.int32) << lag
        bits |= (ahead[..., lag : lag + length] == ids).astype(jnp.int32) << (AHEAD + lag)
    return jnp.where(ids > 0, bits, 0).astype(jnp.int16)
