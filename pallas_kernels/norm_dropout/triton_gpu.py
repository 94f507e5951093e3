"""Hopper, in Pallas' Triton: one kernel a pass.

The backward pass reads x and the cotangent once, makes norm and mask again, and writes the gradient of x. Each program
adds up the scale's gradient over its rows; XLA adds up these sums.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import PROGRAMS, varying_like
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels._pallas_triton import launch, span
from pallas_kernels.norm_dropout.mask import is_kept

ENTRIES = 4096
"""Entries of x that a program holds in registers, if one row is not more."""


class Call(NamedTuple):
    """What the kernels are compiled for.

    Attributes:
      rows, width: of x as a matrix.
      rate, epsilon: as of the operation.
      interpret: run on the CPU.
    """

    rows: int
    width: int
    rate: float
    epsilon: float
    interpret: bool

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that a program holds, both powers of two."""
        columns = 1 << (self.width - 1).bit_length()
        return max(ENTRIES // columns, 1), columns

    @property
    def tiles(self) -> int:
        """Tiles that hold all rows."""
        return pl.cdiv(self.rows, self.tile[0])


def norm_dropout(
    x: Float[Array, "*S D"],
    scale: Float[Array, "D"],
    seed: UInt32[Array, "2"],
    places: Int[Array, "*S"] | None = None,
    *,
    rate: float,
    epsilon: float,
    interpret: bool = False,
) -> Float[Array, "*S D"]:
    """Compute `norm_dropout`; what `api.why_not` refuses is not checked again."""
    width = x.shape[-1]
    call = Call(x.size // width, width, rate, epsilon, interpret)
    drawn = (seed,) if places is None else (seed, places.reshape(-1))
    x, scale, *drawn = vary_alike(x, scale, *drawn)
    y: Any = _fused(call, x.reshape(-1), scale, *drawn)
    return y.reshape(x.shape)


@partial(OwnGradient, nondiff_argnums=(0,))
def _fused(call: Call, x: Float[Array, "N"], *others: Array) -> Float[Array, "N"]:
    kernel, arrays = partial(_forward, call=call), (x, *others)
    options: dict[str, Any] = {"warps": 4, "stages": 1, "interpret": call.interpret}
    return launch(kernel, "norm_dropout", call.tiles, jax.typeof(x), arrays, **options)


def _keep(call: Call, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _fused(call, *arrays), arrays


def _differentiate(call: Call, arrays: tuple[Array, ...], dy: Float[Array, "N"]) -> tuple[Array | None, ...]:
    x, scale, *drawn = arrays
    turns = pl.cdiv(call.tiles, PROGRAMS)
    programs = pl.cdiv(call.tiles, turns)
    kernel = partial(_backward, call=call, turns=turns)
    out = (jax.typeof(x), varying_like(x, (programs * call.width,), jnp.float32))
    options: dict[str, Any] = {"warps": 8, "stages": 1, "interpret": call.interpret}
    dx, sums = launch(kernel, "norm_dropout_gradients", programs, out, (*arrays, dy), **options)
    dscale = jnp.sum(sums.reshape(programs, call.width), 0).astype(scale.dtype)
    return dx, dscale, *(None for _ in drawn)


_fused.defvjp(_keep, _differentiate)


class _Tile:
    """Rows of one turn of a program: which entries they are, and which of these are kept."""

    def __init__(self, call: Call, start: Any, seed: Any, *places: Any) -> None:
        rows, columns = (span(0, count) for count in call.tile)
        rows += start
        inside = rows < call.rows
        self.call, self.inside = call, inside[:, None] & (columns < call.width)[None]
        self.at = rows[:, None] * call.width + columns[None]
        if call.rate:
            for ref in places:
                rows = pltriton.load(ref.at[rows], mask=inside, other=0)
            entry = rows.astype(jnp.uint32)[:, None] * jnp.uint32(call.width)
            self.kept = is_kept(seed, entry + columns.astype(jnp.uint32)[None], call.rate)

    def read(self, ref: Any) -> Float[Array, "rows columns"]:
        """Read entries in fp32, 0 beyond the last row and column."""
        return pltriton.load(ref.at[self.at], mask=self.inside, other=0).astype(jnp.float32)

    def write(self, ref: Any, x: Float[Array, "rows columns"]) -> None:
        """Write what `read` reads."""
        pltriton.store(ref.at[self.at], x.astype(ref.dtype), mask=self.inside)

    def mean(self, x: Float[Array, "rows columns"]) -> Float[Array, "rows 1"]:
        """Return each row's mean."""
        return (jnp.sum(x, 1) / self.call.width)[:, None]

    def drop(self, x: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
        """Return m x / (1 - rate)."""
        return jnp.where(self.kept, x / (1 - self.call.rate), 0.0) if self.call.rate else x


def _read_scale(call: Call, scale: Any) -> Float[Array, "1 columns"]:
    columns = span(0, call.tile[1])
    return pltriton.load(scale.at[columns], mask=columns < call.width, other=0).astype(jnp.float32)[None]


def _forward(x: Any, scale: Any, *refs: Any, call: Call) -> None:
    *drawn, y = refs
    tile = _Tile(call, pl.program_id(0) * call.tile[0], *drawn)
    wide = tile.read(x)
    normal = wide * lax.rsqrt(tile.mean(wide * wide) + call.epsilon)
    tile.write(y, jnp.maximum(tile.drop(normal * _read_scale(call, scale)), 0.0))


def _backward(x: Any, scale: Any, *refs: Any, call: Call, turns: int) -> None:
    *drawn, dy, dx, sums = refs
    program, weights = pl.program_id(0), _read_scale(call, scale)

    def advance(turn: Array, total: Float[Array, "columns"]) -> Float[Array, "columns"]:
        tile = _Tile(call, (program * turns + turn) * call.tile[0], *drawn)
        wide = tile.read(x)
        inverse = lax.rsqrt(tile.mean(wide * wide) + call.epsilon)
        normal = wide * inverse
        through = jnp.where(normal * weights > 0, tile.drop(tile.read(dy)), 0.0)
        inner = through * weights
        tile.write(dx, (inner - normal * tile.mean(inner * normal)) * inverse)
        return total + jnp.sum(through * normal, 0)

    total = lax.fori_loop(0, turns, advance, jnp.zeros(call.tile[1], jnp.float32))
    columns = span(0, call.tile[1])
    pltriton.store(sums.at[program * call.width + columns], total, mask=columns < call.width)
