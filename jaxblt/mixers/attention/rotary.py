"""Position encodings inside attention: rotary by integer phase, and ALiBi's slopes."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

TURN = 2.0**32
"""Phase units in a full turn."""


def rotary_frequencies(head_dim: int, *, theta: float = 10_000.0, scale: float = 1.0) -> np.ndarray:
    """Return the phase advance a position of each pair of channels, in units of 2^-32 turns: uint32 [head_dim / 2].

    f_i = theta^(-2i / head_dim) / (2 pi scale) turns, rounded to a multiple of 2^-32. `scale` > 1 slows every
    frequency, so that a model trained at T positions reads scale * T (position interpolation, 2306.15595).

    Raises:
      ValueError: `head_dim` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs of channels: head_dim must be even, got {head_dim}")
    turns = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) / (2 * np.pi * scale)
    return np.round(turns * TURN).astype(np.uint64).astype(np.uint32)


def rotary_angles(
    positions: Int[Array, "B T"], frequencies: UInt32[np.ndarray, "P"]
) -> Float[Array, "B T P"]:
    """Return the angle in radians, in [-pi, pi), of each pair at each position.

    The phase position * frequency is a product of integers modulo 2^32. So whole turns drop out exactly, and the angle
    is as precise at position 10^9 as at 0. A float32 product errs by .015 radians at 10^6 already.
    """
    phase = positions[..., None].astype(jnp.uint32) * jnp.asarray(frequencies)[None, None]
    return jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * jnp.float32(2 * np.pi / TURN)


def rotate(x: Float[Array, "B T H K"], angles: Float[Array, "#B T P"]) -> Float[Array, "B T H K"]:
    """Turn the pairs (x_i, x_{i + K/2}) by their angles, in fp32 (RoFormer, 2104.09864, sec. 3.4.2).

    Inner products of turned vectors depend on the difference of their positions alone.
    """
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def turn(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    positions: Int[Array, "#B T"],
    *,
    theta: float,
    scale: float,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"]]:
    """Turn queries and keys by the angles of their positions."""
    angles = rotary_angles(positions, rotary_frequencies(q.shape[-1], theta=theta, scale=scale))
    return rotate(q, angles), rotate(k, angles)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Return each head's penalty a step of distance, 2^(-8 h / H), h = 1..H (ALiBi, 2108.12409, sec. 3)."""
    return np.exp2(-8.0 * np.arange(1, num_heads + 1) / num_heads).astype(np.float32)
