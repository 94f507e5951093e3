"""The definition, in fp32."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.norm_dropout.mask import is_kept


def norm_dropout(
    x: Float[Array, "*S D"],
    scale: Float[Array, "D"],
    seed: UInt32[Array, "2"],
    places: Int[Array, "*S"] | None = None,
    *,
    rate: float,
    epsilon: float,
) -> Float[Array, "*S D"]:
    """Compute `norm_dropout` by its definition."""
    wide, (*rows, width) = x.astype(jnp.float32), x.shape
    last = (*(1 for _ in rows), width)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    y = wide * inverse * scale.astype(jnp.float32).reshape(last)
    if rate:
        places = jnp.arange(math.prod(rows)).reshape(rows) if places is None else places
        first = places.astype(jnp.uint32)[..., None] * jnp.uint32(width)
        y = jnp.where(
            is_kept(seed, first + jnp.arange(width, dtype=jnp.uint32).reshape(last), rate), y / (1 - rate), 0
        )
    return jax.nn.relu(y).astype(x.dtype)
