"""The mask: each entry's number is hashed, so that all implementations and all shares of an array draw alike."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

from pallas_kernels._mix import mix


def is_kept(seed: Any, entry: UInt32[Array, "*S"], rate: float) -> Bool[Array, "*S"]:
    """Return where u >= rate 2^32, with u = mix(entry (seed_1 | 1) + seed_0) mod 2^32.

    Seeds differ in the factor too. With one factor for all, their masks would be shifts of one another.
    """
    drawn = mix(entry * (seed[1] | jnp.uint32(1)) + seed[0])
    return drawn >= jnp.uint32(int(rate * 2**32))
