"""The inputs that count at a step of a packed row, as bits: kernels load a word a pair of steps, no segment ids."""

import jax.numpy as jnp
from jaxtyping import Array, Int

AHEAD = 7
"""The place of lag k ahead is AHEAD + k; those of lags behind are 1 to AHEAD, for at most AHEAD + 1 taps."""

ODD = 16
"""The place of the lowest bit of a pair's second step; that of its first step is 0."""


def reach(ids: Int[Array, "*rows T"], taps: int, *, history: bool) -> Int[Array, "*rows firsts W"]:
    """Return an int32 a pair of steps: what counts at its first in the low half.

    The high half says what counts at its second. From a half's lowest bit on: t is a token; t - k is of its document,
    for k = 1 to 7; t + k is. A hole and padding have no bit, and are of no token's document. Steps before the first are
    of its document where there is a history, and of none otherwise.

    With an odd T some rows begin with the second half of a pair. Then firsts is 2: words of rows that begin with a
    whole pair, then words of the same steps one half later. Otherwise it is 1.
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
    bits = jnp.where(ids > 0, bits, 0)
    none = jnp.zeros_like(bits[..., :1])
    starts = [[bits, none], [none, bits]] if length % 2 else [[bits]]
    pairs = jnp.stack([jnp.concatenate(z, axis=-1) for z in starts], axis=-2)
    return pairs[..., ::2] | pairs[..., 1::2] << ODD
