"""The definition, in fp32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def token_product(
    x: Float[Array, "R D"],
    kernels: tuple[Float[Array, "D _"], ...],
    scale: Float[Array, "D"] | None = None,
    added: Float[Array, "R N"] | None = None,
    kept: Bool[Array, "R"] | None = None,
    *,
    gated: bool = False,
    epsilon: float = 1e-6,
    dtype: Any = None,
) -> tuple[Float[Array, "R _"], ...]:
    """Compute `token_product` by its definition."""
    wide = x.astype(jnp.float32)
    if scale is not None:
        square = jnp.mean(wide * wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(square + epsilon) * scale.astype(jnp.float32)[None]
    found = [wide @ kernel.astype(jnp.float32) for kernel in kernels]
    if gated:
        found = [jax.nn.silu(found[0]) * found[1]]
    if added is not None:
        found = [added.astype(jnp.float32) + found[0]]
    if kept is not None:
        found = [jnp.where(kept[:, None], y, 0) for y in found]
    return tuple(y.astype(dtype or x.dtype) for y in found)
