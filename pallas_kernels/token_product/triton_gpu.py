"""Triton: one token times matrices, in one launch that fills the GPU.

A program takes some columns of a matrix and a part of its rows, so that narrow matrices have as many programs as wide
ones. It reads whole lines of memory, and the next tile is on its way while one is added up. Each program computes for
itself what stands before the product: the sum of the parts of the product before, the norm or the gate.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import launch, span
from pallas_kernels.token_product.split import COLUMNS, ROWS, Split, split_rows

WARPS = 4
"""Warps of a program."""


class _Call(NamedTuple):
    """What a program does besides multiplying."""

    normed: bool
    epsilon: float
    split: Split


def token_product(
    x: Float[Array, "D"] | None,
    kernels: tuple[Float[Array, "D _"], ...],
    parts: Float[Array, "S _"] | None = None,
    scale: Float[Array, "D"] | None = None,
    *,
    epsilon: float = 1e-6,
    interpret: bool = False,
) -> tuple[Float[Array, "D"] | None, Float[Array, "P N"]]:
    """Compute `token_product`.

    Args:
      interpret: run on the CPU, for tests.
    """
    dim, widths = kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)
    split = split_rows(dim, widths)
    given = vary_alike(*(z for z in (x, parts, scale, *kernels) if z is not None))
    call = _Call(scale is not None, epsilon, split)
    programs = split.parts * sum(-(-width // COLUMNS) for width in widths)
    like, sums = kernels[0], x is not None and parts is not None
    out = [varying_like(like, (split.parts, sum(widths)), jnp.float32)]
    if sums:
        out.append(varying_like(like, (dim,), like.dtype))
    run = partial(_multiply, call=call, count=len(kernels), has=(x is not None, parts is not None))
    options = {"warps": WARPS, "stages": 1, "interpret": interpret}
    y, *token = launch(run, "token_product", programs, out, given, **options)
    return token[0] if sums else x, y


def _multiply(*refs: Any, call: _Call, count: int, has: tuple[bool, bool]) -> None:
    """Write one part of some columns; the first program writes the token where it is a sum."""
    left = list(refs)
    x, parts, scale = (left.pop(0) if given else None for given in (*has, call.normed))
    kernels, out, token = left[:count], left[count], left[count + 1 :]
    program, parted = pl.program_id(0), call.split.parts
    block, part = lax.div(program, parted), lax.rem(program, parted)
    read = partial(_read_token, x, parts)

    for ref in token:

        @pl.when(program == 0)
        def _(ref: Any = ref) -> None:
            here = pl.ds(0, pl.next_power_of_2(ref.shape[0]))
            inside = span(0, pl.next_power_of_2(ref.shape[0])) < ref.shape[0]
            pltriton.store(ref.at[here], read(here, inside, ref).astype(ref.dtype), mask=inside)

    first, offset = 0, 0
    for kernel in kernels:
        behind = first + -(-kernel.shape[1] // COLUMNS)

        def write(kernel: Any = kernel, first: int = first, offset: int = offset) -> None:
            y = _sum(read, scale, kernel, block - first, part, call)
            here = pl.ds(offset + (block - first) * COLUMNS, COLUMNS)
            own = span((block - first) * COLUMNS, COLUMNS) < kernel.shape[1]
            mask = {} if kernel.shape[1] % COLUMNS == 0 else {"mask": own[None]}
            pltriton.store(out.at[pl.ds(part, 1), here], y[None], **mask)

        if count == 1:
            write()
        else:
            pl.when((block >= first) & (block < behind))(write)
        first, offset = behind, offset + kernel.shape[1]


def _read_token(x: Any, parts: Any, here: Any, inside: Any, like: Any) -> Float[Array, "T"]:
    """Return channels of the token in fp32: what was there and the product before, or its gate."""

    def add(offset: int) -> Array:
        y = jnp.zeros(here.size, jnp.float32)
        for part in range(parts.shape[0]):
            row = parts.at[pl.ds(part, 1), pl.ds(offset + here.start, here.size)]
            y += pltriton.load(row, mask=inside[None], other=0).reshape(here.size)
        return _round(y, like)

    if x is None:
        gate, up = add(0), add(parts.shape[1] // 2)
        return _round(_round(gate / (1 + jnp.exp(-gate)), like) * up, like)
    y = pltriton.load(x.at[here], mask=inside, other=0).astype(jnp.float32)
    return y if parts is None else _round(y + _round(add(0), like), like)


def _round(y: Array, like: Any) -> Array:
    """Return y as the results of a product are rounded."""
    return y.astype(like.dtype).astype(jnp.float32)


def _sum(read: Any, scale: Any, kernel: Any, block: Any, part: Any, call: _Call) -> Float[Array, "N"]:
    """Return one part of n(token) W for a block of columns."""
    (dim, width), (parts, rows) = kernel.shape, call.split
    steps, begin = rows // ROWS, part * rows

    def weights(i: Any) -> Array:
        first = begin + i * ROWS
        inside = (span(first, ROWS) < dim)[:, None]
        mask = {} if parts * rows == dim else {"mask": inside, "other": 0}
        if width % COLUMNS:
            own = span(block * COLUMNS, COLUMNS) < width
            mask = {"mask": inside & own[None], "other": 0}
        return pltriton.load(kernel.at[pl.ds(first, ROWS), pl.ds(block * COLUMNS, COLUMNS)], **mask)

    def advance(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        y, now = carry
        ahead = weights(jnp.minimum(i + 1, steps - 1)) if steps > 1 else now
        here = pl.ds(begin + i * ROWS, ROWS)
        inside = span(here.start, ROWS) < jnp.minimum(dim, begin + rows)
        token = read(here, inside, kernel)
        if scale is not None:
            token = _round(token * pltriton.load(scale.at[here], mask=inside, other=0), kernel)
        return y + token[:, None] * now.astype(jnp.float32), ahead

    now, inverse = weights(0), 1.0
    if scale is not None:
        here = pl.ds(0, pl.next_power_of_2(dim))
        token = read(here, span(0, pl.next_power_of_2(dim)) < dim, kernel)
        inverse = lax.rsqrt(jnp.sum(token * token) / dim + call.epsilon)
    y, _ = lax.fori_loop(0, steps, advance, (jnp.zeros((ROWS, COLUMNS), jnp.float32), now))
    return jnp.sum(y, axis=0) * inverse
