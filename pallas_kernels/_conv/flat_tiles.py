"""Tiles of Hopper kernels that a row shares with its neighbours in memory: see `flat_rows`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._conv.flat_rows import FlatRows
from pallas_kernels._hopper import CHUNK, ROWS


@dataclass(frozen=True)
class Edges:
    """The neighbour's part of a row's last chunk, for each output: chunks that a kernel is not given.

    Attributes:
      flat: how rows lie.
      given: [row, step] in device memory, for each output.
      arrived: the same of a tile's neighbour in shared memory [stage, output, step], as `load` puts it there.
    """

    flat: FlatRows
    given: Sequence[Any]
    arrived: Any

    def load(self, line: Array, slot: Array, barrier: Any) -> None:
        """Copy what lies next to a row, one array for each output, to where `join` reads it."""
        for i, given in enumerate(self.given):
            neighbour = given.at[self.flat.neighbour(line, given.shape[0])]
            plgpu.copy_gmem_to_smem(neighbour, self.arrived.at[slot, i], barrier)

    def join(self, i: int, y: Array, line: Array, tile: Array, slot: Array) -> Array:
        """Return output i of a tile with the neighbour's steps where they lie in it."""

        def join(_: Any, y: Array) -> Array:
            other = read_steps(self.arrived.at[slot, i])
            other = lax.broadcast_in_dim(other, (ROWS, CHUNK), (1,)).astype(y.dtype)
            return jnp.where(_steps_up_to_neighbour(self.flat, line, tile), y, other)

        return lax.fori_loop(0, self.flat.is_shared(line, tile).astype(jnp.int32), join, y)


def keep_own_steps(flat: FlatRows, line: Array, tile: Array, *given: Array) -> tuple[Array, ...]:
    """Return tiles with zeros where steps are not the row's."""

    def mask(_: Any, given: tuple[Array, ...]) -> tuple[Array, ...]:
        own = _steps_up_to_neighbour(flat, line, tile)
        if flat.reverse:
            own &= _steps_before(flat.own(line, tile)[1])
        return tuple(jnp.where(own, z, jnp.zeros_like(z)) for z in given)

    return lax.fori_loop(0, flat.is_shared(line, tile).astype(jnp.int32), mask, given)


def _steps_up_to_neighbour(flat: FlatRows, line: Array, tile: Array) -> Array:
    """Mark steps of a tile that the walk meets before those of the neighbour behind the row."""
    first, stop = flat.own(line, tile)
    return ~_steps_before(first) if flat.reverse else _steps_before(stop)


def _steps_before(end: Array) -> Array:
    """Mark steps of a tile before one.

    Within a chunk they are compared, where two chunks of a thread share them.
    """
    chunk, step = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    return step < end - CHUNK * chunk


def read_steps(ref: Any) -> Array:
    """Read one number for each step of a chunk, as columns of a tile have them."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


Kept = tuple[Sequence[Any], Callable[[], None]]
"""Tiles in shared memory, one for each result, and what writes results to them and commits them."""


def store_row(
    flat: FlatRows, line: Array, tile: Array, results: Sequence[Any], *, whole: Kept, plain: Kept
) -> None:
    """Store the row's chunks of a tile, by one copy for each result where the row fills it.

    Args:
      flat: how rows lie.
      line: the row.
      tile: which of its tiles.
      results: [chunk, step] in device memory.
      whole: used where the row's chunks fill the tile; its tiles are made by `chunks_ref`.
      plain: used where they do not; copies of a part want plain memory.
    """
    cut = flat.is_cut(line, tile)
    start, count = flat.chunks(line)
    done = tile * ROWS

    @pl.when(cut)
    def _() -> None:
        tiles, put = plain
        put()
        _store_chunks(tiles, results, start + done, jnp.minimum(count - done, ROWS))

    @pl.when(~cut)
    def _() -> None:
        tiles, put = whole
        put()
        for kept, result in zip(tiles, results, strict=True):
            plgpu.copy_smem_to_gmem(kept, result.at[pl.ds(start + done, ROWS)])


def _store_chunks(tiles: Sequence[Any], results: Sequence[Any], start: Array, count: Array) -> None:
    """Store the first chunks of plain tiles, at most 64.

    Sizes of copies are fixed, so there is one for each bit of `count`.
    """
    size = ROWS
    while size:
        done = count // (2 * size) * (2 * size)

        @pl.when(count // size % 2 == 1)
        def _(size: int = size, done: Array = done) -> None:
            for kept, result in zip(tiles, results, strict=True):
                plgpu.copy_smem_to_gmem(kept.at[pl.ds(done, size)], result.at[pl.ds(start + done, size)])

        size //= 2
