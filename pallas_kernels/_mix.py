"""A hash of 32 bits that operations draw from."""

import jax.numpy as jnp
from jaxtyping import Array, UInt32


def mix(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Mix by MurmurHash3's 32-bit finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
