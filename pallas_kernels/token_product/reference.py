"""The operation by its definition."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.token_product.split import split_rows

FLOOR = -0.5e30
"""Log-sum-exp below which a part saw nothing."""


def token_product(
    x: Float[Array, "D"] | None,
    kernels: tuple[Float[Array, "D _"], ...],
    parts: Float[Array, "S _"] | None = None,
    scale: Float[Array, "D"] | None = None,
    lse: Float[Array, "S H"] | None = None,
    squares: Float[Array, "S"] | None = None,
    *,
    epsilon: float = 1e-6,
    leaves_norm: bool = False,
) -> tuple[Array | None, ...]:
    """Compute `token_product`, with each step rounded."""
    dim, dtype = kernels[0].shape[0], kernels[0].dtype
    given = parts
    if parts is not None and squares is not None:
        given = parts * jax.lax.rsqrt(jnp.sum(squares) + epsilon)
    token = make_token(x, given, dtype) if lse is None else merge(parts, lse, dtype)
    wide, inverse = token.astype(jnp.float32), jnp.float32(1)
    if scale is not None and not leaves_norm:
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide) + epsilon)
    if scale is not None:
        wide = (wide * scale).astype(dtype).astype(jnp.float32)
    split = split_rows(dim, [kernel.shape[1] for kernel in kernels])
    matrix = jnp.concatenate([kernel.astype(jnp.float32) for kernel in kernels], 1)
    starts = range(0, split.parts * split.rows, split.rows)
    found = [wide[i : i + split.rows] @ matrix[i : i + split.rows] for i in starts]
    mine = jnp.stack([jnp.sum(token[i : i + split.rows].astype(jnp.float32) ** 2) / dim for i in starts])
    y = jnp.stack(found) * inverse
    return (None if x is None else token, y, *([mine] if leaves_norm else []))


def make_token(
    x: Float[Array, "D"] | None, parts: Float[Array, "S _"] | None, dtype: Any
) -> Float[Array, "D"]:
    """Return the token that is multiplied: x, x with the product before, or without x its gate."""
    before: Any = None if parts is None else jnp.sum(parts, 0).astype(dtype)
    if x is None:
        gate, up = jnp.split(before, 2)
        return jax.nn.silu(gate) * up
    return x if before is None else x + before


def merge(parts: Any, lse: Float[Array, "S H"], dtype: Any) -> Float[Array, "D"]:
    """Return attention's output from its parts."""
    top = jnp.maximum(jnp.max(lse, 0), FLOOR)
    weights = jnp.exp(lse - top[None])
    total = jnp.sum(weights, 0)
    shares = weights / jnp.where(total > 0, total, 1)[None]
    return jnp.sum(parts.reshape(*lse.shape, -1) * shares[..., None], 0).reshape(-1).astype(dtype)
