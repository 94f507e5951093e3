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
from pallas_kernels._pallas_triton import FLOOR, LOWEST, launch, product, span
from pallas_kernels.token_product.split import Split, Tile, choose_tile, split_rows

EQUAL_ROWS = 16
"""Rows of the smallest matrix product, all of them the token."""


class _Call(NamedTuple):
    """What a program does besides multiplying; which of x, parts, scale and lse there are."""

    has: tuple[bool, ...]
    epsilon: float
    split: Split
    tile: Tile


def token_product(
    x: Float[Array, "D"] | None,
    kernels: tuple[Float[Array, "D _"], ...],
    parts: Float[Array, "S _"] | None = None,
    scale: Float[Array, "D"] | None = None,
    lse: Float[Array, "S H"] | None = None,
    *,
    epsilon: float = 1e-6,
    chosen: tuple[Tile, Split] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "D"] | None, Float[Array, "P N"]]:
    """Compute `token_product`.

    Args:
      chosen: a tile and a split to try.
      interpret: run on the CPU, for tests.
    """
    dim, widths = kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)
    tile, split = chosen or (choose_tile(dim, widths), split_rows(dim, widths))
    given = vary_alike(*(z for z in (x, parts, scale, lse, *kernels) if z is not None))
    has = tuple(z is not None for z in (x, parts, scale, lse))
    call = _Call(has, epsilon, split, tile)
    programs = split.parts * sum(-(-width // tile.columns) for width in widths)
    like, sums = kernels[0], x is not None and parts is not None
    out = [varying_like(like, (split.parts, sum(widths)), jnp.float32)]
    if sums:
        out.append(varying_like(like, (dim,), like.dtype))
    run = partial(_multiply, call=call, count=len(kernels))
    options = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    y, *token = launch(run, "token_product", programs, out, given, **options)
    return token[0] if sums else x, y


def _multiply(*refs: Any, call: _Call, count: int) -> None:
    """Write one part of some columns; the first program writes the token where it is a sum."""
    left = list(refs)
    x, parts, scale, lse = (left.pop(0) if given else None for given in call.has)
    kernels, out, token = left[:count], left[count], left[count + 1 :]
    program, parted = pl.program_id(0), call.split.parts
    block, part, columns = lax.div(program, parted), lax.rem(program, parted), call.tile.columns
    read = partial(_read_token, x, parts) if lse is None else partial(_merge, parts, lse)

    for ref in token:

        @pl.when(program == 0)
        def _(ref: Any = ref) -> None:
            here = pl.ds(0, pl.next_power_of_2(ref.shape[0]))
            inside = span(0, pl.next_power_of_2(ref.shape[0])) < ref.shape[0]
            pltriton.store(ref.at[here], read(here, inside, ref).astype(ref.dtype), mask=inside)

    first, offset = 0, 0
    for kernel in kernels:
        behind = first + -(-kernel.shape[1] // columns)

        def write(kernel: Any = kernel, first: int = first, offset: int = offset) -> None:
            y = _sum(read, scale, kernel, block - first, part, call)
            here = pl.ds(offset + (block - first) * columns, columns)
            own = span((block - first) * columns, columns) < kernel.shape[1]
            mask = {} if kernel.shape[1] % columns == 0 else {"mask": own[None]}
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


def _merge(parts: Any, lse: Any, here: Any, inside: Any, like: Any) -> Float[Array, "T"]:
    """Return channels of attention's output in fp32, from its parts."""
    count, width = parts.shape[0], parts.shape[1] // lse.shape[1]
    padded = pl.next_power_of_2(count)
    # Spread the shares over all threads: in the layout of a product each would compute them for many channels.
    part = jnp.broadcast_to(span(0, padded)[:, None], (padded, here.size))
    head = jnp.broadcast_to(lax.div(span(here.start, here.size), width)[None], part.shape)
    mask = (part < count) & inside[None]
    sums = pltriton.load(lse.at[part, head], mask=mask, other=LOWEST)
    values = pltriton.load(parts.at[pl.ds(0, padded), here], mask=mask, other=0)
    weights = jnp.exp(sums - jnp.maximum(jnp.max(sums, 0), FLOOR)[None])
    total = jnp.sum(weights, 0)
    return _round(jnp.sum(weights * values, 0) / jnp.where(total > 0, total, 1), like)


def _round(y: Array, like: Any) -> Array:
    """Return y as the results of a product are rounded."""
    return y.astype(like.dtype).astype(jnp.float32)


def _sum(read: Any, scale: Any, kernel: Any, block: Any, part: Any, call: _Call) -> Float[Array, "N"]:
    """Return one part of n(token) W for a block of columns."""
    (dim, width), (parts, rows), tile = kernel.shape, call.split, call.tile
    begin, columns = part * rows, pl.ds(block * tile.columns, tile.columns)
    end = jnp.minimum(dim, begin + rows)

    def weights(first: Any) -> Array:
        mask = {} if parts * rows == dim else {"mask": (span(first, tile.rows) < end)[:, None], "other": 0}
        if width % tile.columns:
            own = span(columns.start, tile.columns) < width
            mask = {"mask": (span(first, tile.rows) < end)[:, None] & own[None], "other": 0}
        return pltriton.load(kernel.at[pl.ds(first, tile.rows), columns], **mask)

    def advance(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        y, squares = carry
        first = begin + i * tile.rows
        inside = span(first, tile.rows) < end
        token = read(pl.ds(first, tile.rows), inside, kernel)
        if scale is not None:
            squares = squares + token * token
            token = token * pltriton.load(scale.at[pl.ds(first, tile.rows)], mask=inside, other=0)
        token = jnp.broadcast_to(token.astype(kernel.dtype)[None], (EQUAL_ROWS, tile.rows))
        return y + product(token, weights(first)), squares

    carry = jnp.zeros((EQUAL_ROWS, tile.columns), jnp.float32), jnp.zeros(tile.rows, jnp.float32)
    y, squares = lax.fori_loop(0, rows // tile.rows, advance, carry)
    y = jnp.sum(y, axis=0) * (1 / EQUAL_ROWS)
    if scale is None:
        return y
    if parts > 1:
        # Read other parts' channels behind the products, so that the matrix is on its way at once.
        here = pl.ds(0, pl.next_power_of_2(dim))
        token = read(here, span(0, pl.next_power_of_2(dim)) < dim, kernel)
        squares = token * token
    return y * lax.rsqrt(jnp.sum(squares) / dim + call.epsilon)
