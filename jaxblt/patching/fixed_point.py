"""Entropies as integers, so that sums do not depend on the order in which they are taken."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MOST_NATS = 6.0  # above ln 260 = 5.56, the entropy of a uniform byte


def fraction_bits(block_size: int, extra_nats: float = 0.0) -> int:
    """Return the bits behind the point (at most 16) with which a block's sum fits in int32.

    The sum has (6 + extra) nats a byte.

    Raises:
      ValueError: not even whole nats fit.
    """
    bits = min(16, 31 - math.ceil(block_size * (MOST_NATS + extra_nats) + 1).bit_length())
    if bits < 0:
        raise ValueError(f"sums over block_size = {block_size} bytes (+ {extra_nats} nats each) exceed int32")
    return bits


def quantise(nats: Float[Array, "*S"], bits: int) -> Int[Array, "*S"]:
    """Return floor(2^bits * nats), nats clipped to 0..6.

    It is exact: scaling by a power of two does not round.
    """
    scaled = jnp.clip(nats.astype(jnp.float32), 0.0, MOST_NATS) * jnp.float32(2**bits)
    return jnp.floor(scaled).astype(jnp.int32)


def quantise_budget(nats: Float[Array, ""], bits: int) -> Int[Array, ""]:
    """Return floor(2^bits * nats) of a budget, which may be as large as int32 holds."""
    scaled = jnp.floor(nats * jnp.float32(2**bits))
    return jnp.clip(scaled, 0.0, 2.0**31 - 128).astype(jnp.int32)
