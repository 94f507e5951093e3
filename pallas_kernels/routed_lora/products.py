"""Products of tokens and matrices, whose results, or whose cotangents, may have channels before time.

The GEMM of a row then reads the one matrix of all rows. XLA makes a broadcast matrix an operand with a stride of 0. Of
"btk,kn->bnt" it would make one GEMM of all rows, and transpose what that wrote in a pass of its own.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def product(
    equation: str, a: Float[Array, "..."], b: Float[Array, "..."], *, wide: bool = False
) -> Float[Array, "..."]:
    """Multiply with sums in fp32 (f64 for f64), rounded to the dtype of a unless `wide`."""
    dtype = wide_of(a.dtype) if wide else a.dtype
    return jnp.einsum(equation, a, b.astype(a.dtype), preferred_element_type=dtype)


def wide_of(dtype: Any) -> Any:
    """Return the dtype of sums."""
    return jnp.float32 if dtype.itemsize < 4 else dtype


def forward(x: Float[Array, "B T K"], w: Float[Array, "K N"], channels_first: bool) -> Float[Array, "B _ _"]:
    """Return x W: [B, T, N], or [B, N, T]."""
    if not channels_first:
        return product("btk,kn->btn", x, w)
    return product("btk,bkn->bnt", x, _of_each_row(w, x))


def backward(
    dy: Float[Array, "B _ _"], w: Float[Array, "K N"], channels_first: bool, *, wide: bool = False
) -> Float[Array, "B T K"]:
    """Return dy W^T of a cotangent [B, T, N], or [B, N, T]."""
    if not channels_first:
        return product("btn,kn->btk", dy, w, wide=wide)
    return product("bnt,bkn->btk", dy, _of_each_row(w, dy), wide=wide)


def of_ranks(
    z: Float[Array, "B T R"], dy: Float[Array, "B _ _"], channels_first: bool
) -> Float[Array, "R N"]:
    """Return z^T dy, wide.

    With channels first it is made row by row, as a product that sums over rows too has to transpose dy.
    """
    if not channels_first:
        return product("btr,btn->rn", z, dy, wide=True)
    return jnp.sum(product("btr,bnt->brn", z, dy, wide=True), 0)


def _of_each_row(w: Float[Array, "K N"], x: Float[Array, "B _ _"]) -> Float[Array, "B K N"]:
    return jnp.broadcast_to(w.astype(x.dtype), (x.shape[0], *w.shape))
