"""Triton: a few tokens times matrices in one launch, with the norm before and the gate or the sum behind.

A program takes some columns of a matrix and all tokens. Each program finds the norm for itself on its way through the
channels: the scale goes in before the product, and the root of the mean square divides behind it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import launch, product, span

LEAST_ROWS = 16
"""Rows of the smallest matrix product."""

MOST_PROGRAMS = 128
"""Programs beyond which wider tiles pay: an H200 has 132 multiprocessors."""


class Tile(NamedTuple):
    """Columns that a program writes, channels that it looks at at a time, its warps, and tiles on their way."""

    columns: int = 16
    inner: int = 128
    warps: int = 4
    stages: int = 4


def choose_tile(columns: int) -> Tile:
    """Return the tile for results of so many columns in all: wide ones read longer rows, narrow ones fill the GPU."""
    return Tile(columns=32 if columns >= 32 * MOST_PROGRAMS else 16)


class _Call(NamedTuple):
    """What a program does besides multiplying, and in which tiles."""

    normed: bool
    added: bool
    kept: bool
    gated: bool
    epsilon: float
    tile: Tile


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
    tile: Tile | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "R _"], ...]:
    """Compute `token_product`.

    Args:
      tile: sizes; None for those of `choose_tile`.
      interpret: run on the CPU, for tests.
    """
    given = vary_alike(*(z for z in (x, scale, added, kept, *kernels) if z is not None))
    widths = [kernel.shape[1] for kernel in kernels]
    made = widths[:1] if gated else widths
    tile = choose_tile(sum(made)) if tile is None else tile
    call = _Call(scale is not None, added is not None, kept is not None, gated, epsilon, tile)
    programs = sum(-(-width // tile.columns) for width in made)
    out = tuple(varying_like(x, (x.shape[0], width), dtype or x.dtype) for width in made)
    run = partial(_multiply, call=call, count=len(kernels))
    options = {"warps": tile.warps, "stages": tile.stages, "interpret": interpret}
    return tuple(launch(run, "token_product", programs, out, given, **options))


def _multiply(*refs: Any, call: _Call, count: int) -> None:
    """Write some columns of one result."""
    x, *rest = refs
    scale, added, kept = (rest.pop(0) if given else None for given in (call.normed, call.added, call.kept))
    kernels, outs = rest[:count], rest[count:]
    program = pl.program_id(0)
    if call.gated:
        gate, up = (_round(y, x) for y in _sums(x, scale, kernels, program, call))
        _store(outs[0], program, _round(gate / (1 + jnp.exp(-gate)), x) * up, None, kept, call)
        return
    first = 0
    for kernel, out in zip(kernels, outs, strict=True):
        behind = first + -(-kernel.shape[1] // call.tile.columns)

        def write(kernel: Any = kernel, out: Any = out, first: int = first) -> None:
            (y,) = _sums(x, scale, [kernel], program - first, call)
            _store(out, program - first, y, added, kept, call)

        if count == 1:
            write()
        else:
            pl.when((program >= first) & (program < behind))(write)
        first = behind


def _round(y: Array, like: Any) -> Array:
    """Return y as the results of its product are rounded."""
    return y.astype(like.dtype).astype(jnp.float32)


def _sums(x: Any, scale: Any, kernels: Any, block: Any, call: _Call) -> list[Float[Array, "M N"]]:
    """Return a block of columns of n(x) W for each of some matrices, in fp32."""
    (tokens, width), tile = x.shape, call.tile
    size = max(LEAST_ROWS, pl.next_power_of_2(tokens))
    real = span(0, size) < tokens
    columns = pl.ds(block * tile.columns, tile.columns)

    def advance(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        *sums, square = carry
        here = pl.ds(i * tile.inner, tile.inner)
        inside = span(i * tile.inner, tile.inner) < width
        channels = pltriton.load(x.at[pl.ds(0, size), here], mask=real[:, None] & inside[None], other=0)
        if scale is not None:
            wide = channels.astype(jnp.float32)
            square += jnp.sum(wide * wide, axis=1)
            factor = pltriton.load(scale.at[here], mask=inside, other=0)
            channels = (wide * factor[None]).astype(channels.dtype)
        for number, kernel in enumerate(kernels):
            own = span(block * tile.columns, tile.columns) < kernel.shape[1]
            whole = width % tile.inner == 0 and kernel.shape[1] % tile.columns == 0
            mask = {} if whole else {"mask": inside[:, None] & own[None], "other": 0}
            weights = pltriton.load(kernel.at[here, columns], **mask)
            sums[number] += product(channels, weights)
        return *sums, square

    nothing = [jnp.zeros((size, tile.columns), jnp.float32) for _ in kernels]
    steps = -(-width // tile.inner)
    *sums, square = lax.fori_loop(0, steps, advance, (*nothing, jnp.zeros(size, jnp.float32)))
    if scale is None:
        return list(sums)
    inverse = lax.rsqrt(square / width + call.epsilon)[:, None]
    return [y * inverse for y in sums]


def _store(out: Any, block: Any, y: Float[Array, "M N"], added: Any, kept: Any, call: _Call) -> None:
    """Write a block of columns, with what is added to it, or zeros where it is not kept."""
    columns, size = call.tile.columns, y.shape[0]
    here = pl.ds(0, size), pl.ds(block * columns, columns)
    real = span(0, size) < out.shape[0]
    mask = real[:, None] & (span(block * columns, columns) < out.shape[1])[None]
    if added is not None:
        y = _round(y, out) + pltriton.load(added.at[*here], mask=mask, other=0).astype(jnp.float32)
    if kept is not None:
        y = jnp.where(pltriton.load(kept.at[pl.ds(0, size)], mask=real, other=False)[:, None], y, 0.0)
    pltriton.store(out.at[*here], y.astype(out.dtype), mask=mask)
