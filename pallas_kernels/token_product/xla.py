"""The operation as XLA's own: one token in parts, whose sums fill a GPU; more of them by matrix products."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

PARTS = 8
"""Parts of the sums of a product of one token."""


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
    """Compute `token_product`, with each step rounded."""
    y, dtype = x, dtype or x.dtype
    if scale is not None:
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, -1, keepdims=True)
        y = (wide * jax.lax.rsqrt(square + epsilon) * scale[None]).astype(x.dtype)
    found = [multiply(y, kernel).astype(dtype) for kernel in kernels]
    if gated:
        found = [jax.nn.silu(found[0]) * found[1]]
    if added is not None:
        found = [added + found[0]]
    if kept is not None:
        found = [jnp.where(kept[:, None], y, jnp.zeros((), dtype)) for y in found]
    return tuple(found)


def multiply(x: Float[Array, "R D"], kernel: Float[Array, "D N"]) -> Float[Array, "R N"]:
    """Return x W in fp32; of one token in one pass over the kernel.

    The parts are added up one after another, which XLA fuses with what reads y. It would otherwise write each weight
    times its channel to memory, and read that again to add it up.
    """
    inner = x.shape[1]
    if x.shape[0] > 1 or inner % PARTS:
        return jnp.dot(x, kernel, preferred_element_type=jnp.float32)
    token, matrix = (a.reshape(PARTS, inner // PARTS, -1).astype(jnp.float32) for a in (x, kernel))
    return reduce(jnp.add, jnp.sum(token * matrix, 1))[None]
