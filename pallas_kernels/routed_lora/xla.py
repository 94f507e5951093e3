"""One read of x for the down projections of all sites, and a gradient whose products stay in the dtype of x.

A product as large as x or y asks for the dtype of x. If it asked for fp32, XLA would write fp32 and cast it in another
pass. In a sum of such products each GEMM adds what the one before it wrote. XLA looks for that GEMM in the first
operand of the sum.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels.routed_lora.active import masked
from pallas_kernels.routed_lora.reference import Matrices, code_of_ranks

Kept = tuple[Any, Matrices | None, Matrices, Matrices, Any, Any]


def routed_lora_xla(
    x: Float[Array, "B T K"],
    w: Matrices | None,
    v: Matrices,
    u: Matrices,
    code: Float[Array, "B C E"] | None,
    *,
    chunk: int,
    scale: float,
    active: Bool[Array, "tiles E"] | None = None,
) -> tuple[Float[Array, "B T _"], ...]:
    """See `routed_lora`. Blocks that are not active are computed too, with a code of 0."""
    if code is not None and active is not None:
        code, chunk = masked(code, active, chunk, x.shape[1]), 1
    flat, tree = jax.tree.flatten((x, w, v, u, code))
    return _routed(chunk, scale, *jax.tree.unflatten(tree, vary_alike(*flat)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _routed(
    chunk: int, scale: float, x: Any, w: Matrices | None, v: Matrices, u: Matrices, code: Any
) -> tuple[Array, ...]:
    """The gradient is written out: JAX's own multiplies an fp32 cotangent of x V by V in fp32.

    With g = dy U^T, s = scale g c and p = x V: dx = dy W^T + s V^T, dV = x^T s, dU = (scale p c)^T dy, and dc sums
    scale g p over the ranks of a block, the sites and the tokens of a chunk.
    """
    return _forward(chunk, scale, x, w, v, u, code)[0]


def _forward(
    chunk: int, scale: float, x: Any, w: Matrices | None, v: Matrices, u: Matrices, code: Any
) -> tuple[tuple[Array, ...], Kept]:
    p = product("btk,kr->btr", x, joined(v), wide=True)
    z = scaled(p, v, code, chunk, scale)
    y = [product("btr,rn->btn", part.astype(x.dtype), up) for part, up in zip(z, u, strict=True)]
    if w is not None:
        y = [product("btk,kn->btn", x, weight) + update for update, weight in zip(y, w, strict=True)]
    return tuple(y), (x, w, v, u, code, p)


def _backward(chunk: int, scale: float, kept: Kept, dy: tuple[Array, ...]) -> tuple[Any, ...]:
    return gradients(chunk, scale, kept, dy, _input_gradient)


def _input_gradient(dy: tuple[Array, ...], w: Matrices | None, v: Matrices, s: Array) -> Array:
    dx = product("btr,kr->btk", s, joined(v))
    for d, weight in zip(dy, w or (), strict=w is not None):
        dx = product("btn,kn->btk", d, weight) + dx
    return dx


def gradients(
    chunk: int,
    scale: float,
    kept: Kept,
    dy: tuple[Float[Array, "B T _"], ...],
    input_gradient: Callable[[tuple[Array, ...], Matrices | None, Matrices, Array], Array],
) -> tuple[Any, ...]:
    """Those of x, w, v, u and code; `input_gradient` makes the first of dy, w, v and s [B, T, R], as in `_routed`."""
    x, w, v, u, code, p = kept
    g = jnp.concatenate([product("btn,rn->btr", d, up, wide=True) for d, up in zip(dy, u, strict=True)], -1)
    s = jnp.concatenate(scaled(g, v, code, chunk, scale), -1).astype(x.dtype)
    dx = input_gradient(dy, w, v, s)
    dv = _split(product("btk,btr->kr", x, s, wide=True), v)
    z = scaled(p, v, code, chunk, scale)
    du = [product("btr,btn->rn", a.astype(x.dtype), d, wide=True) for a, d in zip(z, dy, strict=True)]
    dw = None if w is None else _weight_gradients(x, w, dy)
    dcode = None if code is None else _code_gradient(p * g, v, code, chunk, scale)
    return dx, dw, _cast(dv, v), _cast(du, u), dcode


_routed.defvjp(_forward, _backward)


def _weight_gradients(x: Array, w: Matrices, dy: tuple[Array, ...]) -> Matrices:
    found = (product("btk,btn->kn", x, d, wide=site.dtype != x.dtype) for site, d in zip(w, dy, strict=True))
    return _cast(found, w)


def product(
    equation: str, a: Float[Array, "..."], b: Float[Array, "..."], *, wide: bool = False
) -> Float[Array, "..."]:
    """Summed in fp32 (f64 for f64) and rounded to the dtype of a, unless it is to stay `wide`."""
    dtype = jnp.float32 if wide and a.dtype.itemsize < 4 else a.dtype
    return jnp.einsum(equation, a, b.astype(a.dtype), preferred_element_type=dtype)


def joined(v: Matrices) -> Float[Array, "K R"]:
    """The sites' V side by side."""
    return v[0] if len(v) == 1 else jnp.concatenate(v, 1)


def _split(ranks: Array, v: Matrices) -> list[Array]:
    ends = [sum(site.shape[1] for site in v[: i + 1]) for i in range(len(v) - 1)]
    return jnp.split(ranks, ends, -1)


def scaled(
    p: Float[Array, "B T R"], v: Matrices, code: Float[Array, "B C E"] | None, chunk: int, scale: float
) -> list[Float[Array, "B T _"]]:
    """scale p c, site by site, in fp32."""
    parts = [part * jnp.asarray(scale, p.dtype) for part in _split(p, v)]
    if code is None:
        return parts
    numbers = [code_of_ranks(code.astype(p.dtype), chunk, p.shape[1], part.shape[-1]) for part in parts]
    return [part * c for part, c in zip(parts, numbers, strict=True)]


def _code_gradient(
    product: Array, v: Matrices, code: Float[Array, "B C E"], chunk: int, scale: float
) -> Float[Array, "B C E"]:
    """scale g p summed over what shares a number."""
    rows, chunks, blocks = code.shape
    per_site = [jnp.sum(part.reshape(*part.shape[:2], blocks, -1), -1) for part in _split(product, v)]
    token = sum(per_site[1:], per_site[0]) * jnp.asarray(scale, product.dtype)
    padded = lax.pad(
        token, jnp.zeros((), token.dtype), ((0, 0, 0), (0, chunks * chunk - token.shape[1], 0), (0, 0, 0))
    )
    return jnp.sum(padded.reshape(rows, chunks, chunk, blocks), 2).astype(code.dtype)


def _cast(gradients: Any, like: Matrices) -> Matrices:
    return tuple(g.astype(a.dtype) for g, a in zip(gradients, like, strict=True))
