"""The two FP8 formats, and arrays rounded to them by a scale that is a power of two."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_EXPONENT = 0x7F800000
_LEAST, _MOST = 2.0**-60, 2.0**60


class Format(NamedTuple):
    """An FP8 format: its dtype in JAX, bits of exponent and mantissa, and the ends of its range."""

    dtype: Any
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest_normal: float
    smallest: float


E4M3 = Format(jnp.float8_e4m3fn, 4, 3, 448.0, 2.0**-6, 2.0**-9)
"""Of values and weights. It has no infinity."""
E5M2 = Format(jnp.float8_e5m2, 5, 2, 57344.0, 2.0**-14, 2.0**-16)
"""Of gradients, which span more."""


def largest_entry(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Return max |x| in fp32; NaN if x has a NaN."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def scale_for(largest: Float[Array, "..."], kind: Format, margin: int = 0) -> Float[Array, "..."]:
    """Return the greatest power of two s with s · largest · 2^margin within the format's range.

    Multiplying by a power of two rounds nothing, so that scales may be applied in any dtype, before a product or after
    it. It is 1 where `largest` is 0, and kept within 2^±60, so that the inverse of two scales is finite.
    """
    ratio = jnp.float32(kind.largest * 2.0**-margin) / jnp.where(largest > 0, largest, 1)
    ratio = jnp.clip(ratio, _LEAST, _MOST)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) & jnp.uint32(_EXPONENT)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(largest > 0, scale, jnp.float32(1))


def ratio_for(largest: Float[Array, "..."], kind: Format) -> Float[Array, "..."]:
    """Return the format's largest number over the largest entry, as Transformer Engine scales tensors.

    It is 1 where `largest` is 0, and the largest fp32 number where the ratio exceeds that.
    """
    ratio = jnp.float32(kind.largest) / jnp.where(largest > 0, largest, 1)
    return jnp.where(largest > 0, jnp.minimum(ratio, jnp.finfo(jnp.float32).max), jnp.float32(1))


def quantise(x: Float[Array, "..."], scale: Float[Array, "..."], kind: Format) -> Array:
    """Return s · x rounded to the format. What exceeds its range becomes its largest number; NaN stays NaN."""
    top = jnp.asarray(kind.largest, x.dtype)
    return jnp.clip(x * scale.astype(x.dtype), -top, top).astype(kind.dtype)
