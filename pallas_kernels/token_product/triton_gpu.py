"""Triton: one token times matrices, in one launch that fills the GPU.

A program takes some columns of a matrix and a part of its rows, so that narrow matrices have as many programs as wide
ones. It asks for whole lines of its matrix first. While they are on their way, it computes for itself what stands
before the product: the sum of the parts of the product before, the norm, the gate or the merge.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import FLOOR, LOWEST, launch, span
from pallas_kernels.token_product.split import TILE, Split, Tile, split_rows

Make = Callable[[], Float[Array, "T"]]
"""Computes channels of the token, which were loaded before."""


class _Call(NamedTuple):
    """What a program does besides multiplying; which of x, parts, scale, lse and squares there are."""

    has: tuple[bool, ...]
    epsilon: float
    split: Split
    tile: Tile
    interpret: bool
    leaves_norm: bool


class _Written(NamedTuple):
    """What programs of the first columns write besides the product, where there is such."""

    token: list[Any]
    squares: Any


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
    chosen: tuple[Tile, Split] | None = None,
    interpret: bool = False,
) -> tuple[Array | None, ...]:
    """Compute `token_product`.

    Args:
      chosen: a tile and a split to try.
      interpret: run on the CPU, for tests.
    """
    dim, widths = kernels[0].shape[0], tuple(kernel.shape[1] for kernel in kernels)
    tile, split = chosen or (TILE, split_rows(dim, widths))
    given = vary_alike(*(z for z in (x, parts, scale, lse, squares, *kernels) if z is not None))
    has = tuple(z is not None for z in (x, parts, scale, lse, squares))
    call = _Call(has, epsilon, split, tile, interpret, leaves_norm)
    programs = split.parts * sum(-(-width // tile.columns) for width in widths)
    like, sums = kernels[0], x is not None and parts is not None
    out = [varying_like(like, (split.parts, sum(widths)), jnp.float32)]
    if sums:
        out.append(varying_like(like, (dim,), like.dtype))
    if leaves_norm:
        out.append(varying_like(like, (split.parts,), jnp.float32))
    run = partial(_multiply, call=call, count=len(kernels))
    options = {"warps": tile.warps, "stages": 1, "interpret": interpret}
    y, *others = launch(run, "token_product", programs, out, given, **options)
    token = others.pop(0) if sums else x
    return token, y, *others


def _multiply(*refs: Any, call: _Call, count: int) -> None:
    """Write one part of some columns; programs of the first columns write the token where it is a sum."""
    left = list(refs)
    x, parts, scale, lse, squares = (left.pop(0) if given else None for given in call.has)
    kernels, out, others = left[:count], left[count], left[count + 1 :]
    writes = _Written(others[:-1], others[-1]) if call.leaves_norm else _Written(others, None)
    program, parted = pl.program_id(0), call.split.parts
    block, part, columns = lax.div(program, parted), lax.rem(program, parted), call.tile.columns
    load = partial(_load_token, x, parts, squares, call) if lse is None else partial(_load_merged, parts, lse)

    first, offset = 0, 0
    for kernel in kernels:
        behind = first + -(-kernel.shape[1] // columns)

        def write(kernel: Any = kernel, first: int = first, offset: int = offset) -> None:
            written = _Written([], None) if first else writes
            y = _sum(load, scale, kernel, written, block - first, part, call)
            here = pl.ds(offset + (block - first) * columns, columns)
            own = span((block - first) * columns, columns) < kernel.shape[1]
            mask = {} if kernel.shape[1] % columns == 0 else {"mask": own[None]}
            pltriton.store(out.at[pl.ds(part, 1), here], y[None], **mask)

        if count == 1:
            write()
        else:
            pl.when((block >= first) & (block < behind))(write)
        first, offset = behind, offset + kernel.shape[1]


def _load_token(x: Any, parts: Any, squares: Any, call: _Call, here: Any, inside: Any, like: Any) -> Make:
    """Load channels of what was there and the product before, or of the gate's halves."""

    def load(offset: int) -> list[Array]:
        return _load_parts(parts, pl.ds(offset + here.start, here.size), inside)

    if x is None:
        halves = load(0), load(parts.shape[1] // 2)
        means = [] if squares is None else [squares[i] for i in range(squares.shape[0])]

        def gated() -> Array:
            inverse = lax.rsqrt(reduce(jnp.add, means) + call.epsilon) if means else 1.0
            gate, up = (_round(reduce(jnp.add, half) * inverse, like) for half in halves)
            return _round(_round(gate / (1 + jnp.exp(-gate)), like) * up, like)

        return gated
    y = pltriton.load(x.at[here], mask=inside, other=0).astype(jnp.float32)
    if parts is None:
        return lambda: y
    before = load(0)
    return lambda: _round(y + _round(reduce(jnp.add, before), like), like)


def _load_merged(parts: Any, lse: Any, here: Any, inside: Any, like: Any) -> Make:
    """Load channels of attention's parts, and their log-sum-exps."""
    head = lax.div(span(here.start, here.size), parts.shape[1] // lse.shape[1])
    sums, values = _load_parts(lse, head, inside, LOWEST), _load_parts(parts, here, inside)

    def merge() -> Array:
        top = reduce(jnp.maximum, sums, jnp.full(here.size, FLOOR))
        weights = [jnp.exp(each - top) for each in sums]
        total = reduce(jnp.add, weights)
        y = reduce(jnp.add, [weight * value for weight, value in zip(weights, values, strict=True)])
        return _round(y / jnp.where(total > 0, total, 1), like)

    return merge


def _load_parts(parts: Any, there: Any, inside: Any, other: float = 0) -> list[Array]:
    """Load channels of each part, so that a thread has all parts of a channel."""
    rows = [parts.at[jnp.int32(part), there] for part in range(parts.shape[0])]
    return [pltriton.load(row, mask=inside, other=other) for row in rows]


def _round(y: Array, like: Any) -> Array:
    """Return y as the results of a product are rounded."""
    return y.astype(like.dtype).astype(jnp.float32)


def _sum(
    load: Any, scale: Any, kernel: Any, written: _Written, block: Any, part: Any, call: _Call
) -> Float[Array, "N"]:
    """Return one part of n(token) W for a block of columns; the first block's programs write the token."""
    (dim, width), (parts, rows), tile = kernel.shape, call.split, call.tile
    begin, columns, count = part * rows, pl.ds(block * tile.columns, tile.columns), rows // tile.rows
    end, padded = jnp.minimum(dim, begin + rows), pl.next_power_of_2(dim)
    each = min(tile.loads, count)
    even = parts * rows == dim and count % each == 0

    def weights(first: Any) -> Array:
        mask = {} if even else {"mask": (span(first, tile.rows) < end)[:, None], "other": 0}
        if width % tile.columns:
            own = span(columns.start, tile.columns) < width
            mask = {"mask": (span(first, tile.rows) < end)[:, None] & own[None], "other": 0}
        return pltriton.load(kernel.at[pl.ds(first, tile.rows), columns], **mask)

    def request(group: Any) -> tuple[list[Array], list[Any]]:
        """Load a group's tiles of the matrix, and what their rows of the token are made of."""
        firsts = [begin + (group * each + i) * tile.rows for i in range(each)]
        tiles = [weights(first) for first in firsts]
        if not call.interpret:
            # Keep these loads in front: ptxas moves a load to just before its use, but not over a barrier.
            pltriton.debug_barrier()
        loaded = []
        for first in firsts:
            here, inside = pl.ds(first, tile.rows), span(first, tile.rows) < end
            scales = None if scale is None else pltriton.load(scale.at[here], mask=inside, other=0)
            loaded.append((here, inside, load(here, inside, kernel), scales))
        return tiles, loaded

    def add(requested: tuple[list[Array], list[Any]], y: Any, squares: Any) -> tuple[Array, Array]:
        for matrix, (here, inside, make, scales) in zip(*requested, strict=True):
            token = make()
            for ref in written.token:
                pltriton.store(ref.at[here], token.astype(ref.dtype), mask=inside & (block == 0))
            if scales is not None:
                squares, token = squares + token * token, token * scales
            product = _round(token, kernel)[:, None] * matrix.astype(jnp.float32)
            y = product if y is None else y + product
        return y, squares

    requested = request(0)
    everything = scale is not None and parts > 1 and not call.leaves_norm
    others = load(pl.ds(0, padded), span(0, padded) < dim, kernel) if everything else None
    y, squares = add(requested, None, jnp.zeros(tile.rows, jnp.float32))
    if count > each:
        y, squares = lax.fori_loop(1, -(-count // each), lambda i, sums: add(request(i), *sums), (y, squares))
    y = jnp.sum(y, axis=0)
    if written.squares is not None:
        mine = (jnp.sum(squares) / dim).reshape(1)
        pltriton.store(written.squares.at[pl.ds(part, 1)], mine, mask=jnp.full(1, block == 0))
    if scale is None or call.leaves_norm:
        return y
    squares = squares if others is None else others() ** 2
    return y * lax.rsqrt(jnp.sum(squares) / dim + call.epsilon)
