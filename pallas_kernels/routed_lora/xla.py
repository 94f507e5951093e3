"""One read of x for the down projections of all sites, and a gradient whose products stay in the dtype of x.

A product as large as x or y asks for the dtype of x. If it asked for fp32, XLA would write fp32 and cast it in another
pass. In a sum of such products each GEMM adds what the one before it wrote. XLA looks for that GEMM in the first
operand of the sum.

Where W is small, a copy of it costs less than passes over the tokens do. In 16 bits such a call has:

- few tokens: x [W | V] of all sites is one product, and the updates are another;
- more: y = [x | z] [W; U], so that no pass adds the update, unless y is narrower than x. Likewise dx of one site, if y
  has time before channels.

Backward, [dx | g] = dy [W^T | U^T] of several sites is one product. Without a code the update's share of dx is in W:
dx = dy (W + scale V U)^T. These sum in another order than a product with only W may, so fp32 goes without: there a
call whose U or code is 0 equals the base bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.routed_lora.active import masked
from pallas_kernels.routed_lora.products import backward, forward, of_ranks, product, wide_of
from pallas_kernels.routed_lora.reference import Matrices, code_of_ranks

Kept = tuple[Any, Matrices | None, Matrices, Matrices, Any, Any]


class Options(NamedTuple):
    """Options of `routed_lora` that are known when it is traced."""

    chunk: int
    scale: float
    channels_first: bool


COPIED = 8 * 2**20
"""Bytes of W at most that a call copies beside V or U: 3.5 microseconds at an H200's 4.8 TB/s."""

ALIGNED = 8
"""Numbers of 16 bits in the 16 bytes that a GEMM loads at a time: what lies beside W is filled up to a multiple."""

MERGED = 32 * 2**20
"""Bytes of x, W and y at most of such a call: XLA itself merges products up to `xla_gpu_dot_merger_threshold_mb`."""


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
    channels_first: bool = False,
) -> tuple[Float[Array, "B _ _"], ...]:
    """Compute `routed_lora` by XLA.

    Blocks that are not active are computed too, with a code of 0.
    """
    if code is not None and active is not None:
        code, chunk = masked(code, active, chunk, x.shape[1]), 1
    flat, tree = jax.tree.flatten((x, w, v, u, code))
    options = Options(chunk, scale, channels_first)
    return _routed(options, *jax.tree.unflatten(tree, vary_alike(*flat)))


@partial(OwnGradient, nondiff_argnums=(0,))
def _routed(
    options: Options, x: Any, w: Matrices | None, v: Matrices, u: Matrices, code: Any
) -> tuple[Array, ...]:
    """Compute y with a gradient written out.

    JAX's own multiplies an fp32 cotangent of x V by V in fp32. With g = dy U^T, s = scale g c and p = x V: dx = dy W^T
    + s V^T, dV = x^T s, dU = (scale p c)^T dy, and dc sums scale g p over the ranks of a block, the sites and the
    tokens of a chunk.
    """
    return _forward(options, x, w, v, u, code)[0]


def _forward(
    options: Options, x: Any, w: Matrices | None, v: Matrices, u: Matrices, code: Any
) -> tuple[tuple[Array, ...], Kept]:
    if w is not None and is_small(x, w):
        y, p = _together(options, x, w, v, u, code)
        return y, (x, w, v, u, code, p)
    p = product("btk,kr->btr", x, joined(v), wide=True)
    z, order = scaled(p, v, code, options), options.channels_first
    if w is not None and is_copied(x, w) and x.shape[2] <= _ends(w)[-1]:
        return _behind(x, z, w, u, order), (x, w, v, u, code, p)
    y = [forward(part.astype(x.dtype), up, order) for part, up in zip(z, u, strict=True)]
    if w is not None:
        y = [forward(x, weight, order) + update for update, weight in zip(y, w, strict=True)]
    return tuple(y), (x, w, v, u, code, p)


def is_copied(x: Any, w: Any) -> bool:
    """Return whether W may be copied beside V or U: in 16 bits, where it is small."""
    return x.dtype.itemsize == 2 and 2 * x.shape[2] * sum(site.shape[1] for site in w) <= COPIED


def is_small(x: Any, w: Any) -> bool:
    """Return whether x [W | V] of all sites is one product.

    It is where kernels cost more than a copy of W.
    """
    tokens, width = prod(x.shape[:2]), sum(site.shape[1] for site in w)
    whole = x.shape[2] * width + tokens * (x.shape[2] + width)
    return is_copied(x, w) and 2 * whole <= MERGED


def _together(
    options: Options, x: Array, w: Matrices, v: Matrices, u: Matrices, code: Any
) -> tuple[tuple[Array, ...], Array]:
    """Return y of each site, and p in the dtype of x.

    They are two products, x [W | V] and (p c) diag(scale U). Each y is rounded before its update is added, as it is for
    many tokens.
    """
    order, axis = options.channels_first, 1 if options.channels_first else 2
    both = forward(x, jnp.concatenate([a.astype(x.dtype) for a in (*w, *v)], 1), order)
    *base, p = jnp.split(both, _ends(w), axis)
    p = p.swapaxes(1, 2) if order else p
    wide, z = wide_of(x.dtype), p
    if code is not None:
        numbers = [code_of_ranks(code.astype(wide), options.chunk, x.shape[1], site.shape[1]) for site in v]
        z = (p.astype(wide) * jnp.concatenate(numbers, -1)).astype(x.dtype)
    up = [(site.astype(wide) * jnp.asarray(options.scale, wide)).astype(x.dtype) for site in u]
    updates = jnp.split(forward(z, _diagonal(up, x.dtype), order), _ends(u)[:-1], axis)
    return tuple(y + update for y, update in zip(base, updates, strict=True)), p


def _behind(
    x: Array, z: list[Array], w: Matrices, u: Matrices, channels_first: bool = False
) -> tuple[Array, ...]:
    """Return y = [x | z] [W; U] of each site, with rows of zeros for the ranks of others."""
    rows = _filled(_diagonal(u, x.dtype))
    free = jnp.zeros((*x.shape[:2], len(rows) - sum(a.shape[0] for a in u)), x.dtype)
    both = jnp.concatenate([x, *(part.astype(x.dtype) for part in z), free], -1)
    pairs = zip(w, _split(rows, u), strict=True)
    return tuple(forward(both, jnp.concatenate([a.astype(x.dtype), b]), channels_first) for a, b in pairs)


def _diagonal(matrices: Sequence[Array], dtype: Any) -> Float[Array, "R N"]:
    """Lay matrices along the diagonal, with zeros elsewhere."""
    return jnp.block(
        [
            [
                a.astype(dtype) if i == j else jnp.zeros((a.shape[0], b.shape[1]), dtype)
                for j, b in enumerate(matrices)
            ]
            for i, a in enumerate(matrices)
        ]
    )


def _filled(rows: Float[Array, "R N"]) -> Float[Array, "_ N"]:
    """Fill up with rows of zeros to a multiple of `ALIGNED`."""
    return jnp.pad(rows, ((0, -len(rows) % ALIGNED), (0, 0)))


def _backward(options: Options, kept: Kept, dy: tuple[Array, ...]) -> tuple[Any, ...]:
    x, w, v, u, code, _ = kept
    plain = partial(_input_gradient, options.channels_first)
    if w is None or not is_copied(x, w):
        return gradients(options, kept, dy, plain)
    weight = jnp.concatenate([a.astype(x.dtype) for a in w], 1)
    if code is None:  # s V^T = dy (scale V U)^T
        update = product("kr,rn->kn", joined(v).astype(x.dtype), _diagonal(u, x.dtype), wide=True)
        update = update * jnp.asarray(options.scale, update.dtype)
        weight = (weight.astype(update.dtype) + update).astype(x.dtype)
    if len(w) > 1:
        return _gradients_together(options, kept, dy, weight)
    if code is None:
        return gradients(options, kept, dy, lambda dy, *_: backward(dy[0], weight, options.channels_first))
    narrow = _ends(w)[-1] <= x.shape[2] and not options.channels_first
    return gradients(options, kept, dy, _narrow_gradient if narrow else plain)


def _narrow_gradient(dy: tuple[Array, ...], w: Any, v: Matrices, s: Array) -> Array:
    """Return dx = [dy | s] [W | V]^T of one site."""
    return _behind(dy[0], [s], (w[0].T,), (v[0].T,))[0]


def _gradients_together(
    options: Options, kept: Kept, dy: tuple[Array, ...], weight: Float[Array, "K N"]
) -> tuple[Any, ...]:
    """Return gradients of x, w, v, u and code.

    `weight` is W, or W + scale V U, of the sites side by side. The cotangents lie side by side too. Behind the barrier
    XLA writes them so where it makes them. Without it XLA takes them apart in the product for dU, and so copies them
    for the other.
    """
    x, _, v, u, code, p = kept
    order = options.channels_first
    whole = lax.optimization_barrier(jnp.concatenate(dy, 1 if order else 2))
    both = backward(whole, jnp.concatenate([weight, _filled(_diagonal(u, x.dtype))]), order)
    dx, g = jnp.split(both[..., : x.shape[2] + p.shape[2]], [x.shape[2]], -1)
    g = g.astype(wide_of(g.dtype))
    s = jnp.concatenate(scaled(g, v, code, options), -1).astype(x.dtype)
    if code is not None:
        dx = dx + product("btr,kr->btk", s, joined(v))
    du = _blocks(of_ranks(jnp.concatenate(_up(options, kept), -1), whole, order), u)
    dw, dv, dcode = _others(options, kept, dy, g, s)
    return dx, dw, dv, _cast(du, u), dcode


def _blocks(matrix: Float[Array, "R N"], like: Matrices) -> list[Array]:
    """Return blocks on the diagonal of a matrix, of the shapes of `like`."""
    rows = jnp.split(matrix, list(accumulate(a.shape[0] for a in like))[:-1])
    return [jnp.split(row, _ends(like)[:-1], 1)[i] for i, row in enumerate(rows)]


def _input_gradient(
    channels_first: bool, dy: tuple[Array, ...], w: Matrices | None, v: Matrices, s: Array
) -> Array:
    dx = backward(s, joined(v), channels_first)
    for d, weight in zip(dy, w or (), strict=w is not None):
        dx = backward(d, weight, channels_first) + dx
    return dx


def gradients(
    options: Options,
    kept: Kept,
    dy: tuple[Float[Array, "B _ _"], ...],
    input_gradient: Callable[[tuple[Array, ...], Matrices | None, Matrices, Array], Array],
) -> tuple[Any, ...]:
    """Return gradients of x, w, v, u and code.

    `input_gradient` makes the first of dy, w, v and s, as in `_routed`. s has its axes in the order of dy.
    """
    x, w, v, u, code, _ = kept
    order = options.channels_first
    g = jnp.concatenate([backward(d, up, order, wide=True) for d, up in zip(dy, u, strict=True)], -1)
    s = jnp.concatenate(scaled(g, v, code, options), -1).astype(x.dtype)
    dx = input_gradient(dy, w, v, s.swapaxes(1, 2) if order else s)
    du = [of_ranks(part, d, order) for part, d in zip(_up(options, kept), dy, strict=True)]
    dw, dv, dcode = _others(options, kept, dy, g, s)
    return dx, dw, dv, _cast(du, u), dcode


def _up(options: Options, kept: Kept) -> list[Float[Array, "B T _"]]:
    """Return z of each site."""
    x, _, v, _, code, p = kept
    return [part.astype(x.dtype) for part in scaled(p.astype(wide_of(p.dtype)), v, code, options)]


def _others(options: Options, kept: Kept, dy: tuple[Array, ...], g: Array, s: Array) -> tuple[Any, Any, Any]:
    """Return gradients of w, v and code."""
    x, w, v, _, code, p = kept
    dw = None if w is None else _weight_gradients(x, w, dy, options.channels_first)
    dv = _cast(_split(product("btk,btr->kr", x, s, wide=True), v), v)
    return dw, dv, None if code is None else _code_gradient(p.astype(g.dtype) * g, v, code, options)


_routed.defvjp(_forward, _backward)


def _weight_gradients(x: Array, w: Matrices, dy: tuple[Array, ...], channels_first: bool) -> Matrices:
    """Return gradients of weights.

    XLA transposes a dy with channels first, as the sums of single rows can be larger than it.
    """
    equation = "btk,bnt->kn" if channels_first else "btk,btn->kn"
    found = (product(equation, x, d, wide=site.dtype != x.dtype) for site, d in zip(w, dy, strict=True))
    return _cast(found, w)


def joined(v: Matrices) -> Float[Array, "K R"]:
    """Lay the sites' V side by side."""
    return v[0] if len(v) == 1 else jnp.concatenate(v, 1)


def _split(ranks: Array, v: Matrices) -> list[Array]:
    return jnp.split(ranks, _ends(v)[:-1], -1)


def _ends(matrices: Matrices) -> list[int]:
    """Return the columns up to the end of each matrix, where they lie side by side."""
    return list(accumulate(matrix.shape[1] for matrix in matrices))


def scaled(
    p: Float[Array, "B T R"], v: Matrices, code: Float[Array, "B C E"] | None, options: Options
) -> list[Float[Array, "B T _"]]:
    """Return scale p c, site by site, in fp32."""
    parts = [part * jnp.asarray(options.scale, p.dtype) for part in _split(p, v)]
    if code is None:
        return parts
    given = code.astype(p.dtype), options.chunk, p.shape[1]
    numbers = [code_of_ranks(*given, part.shape[-1]) for part in parts]
    return [part * c for part, c in zip(parts, numbers, strict=True)]


def _code_gradient(
    product: Array, v: Matrices, code: Float[Array, "B C E"], options: Options
) -> Float[Array, "B C E"]:
    """Return scale g p summed over what shares a number."""
    rows, chunks, blocks = code.shape
    per_site = [jnp.sum(part.reshape(*part.shape[:2], blocks, -1), -1) for part in _split(product, v)]
    token = sum(per_site[1:], per_site[0]) * jnp.asarray(options.scale, product.dtype)
    missing = chunks * options.chunk - token.shape[1]
    padded = lax.pad(token, jnp.zeros((), token.dtype), ((0, 0, 0), (0, missing, 0), (0, 0, 0)))
    return jnp.sum(padded.reshape(rows, chunks, options.chunk, blocks), 2).astype(code.dtype)


def _cast(gradients: Any, like: Matrices) -> Matrices:
    return tuple(g.astype(a.dtype) for g, a in zip(gradients, like, strict=True))
