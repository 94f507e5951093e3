"""Tiles of the Hopper kernels that a row shares with its neighbours in memory: see `_conv.flat_rows`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._conv.flat_rows import FlatRows
from pallas_kernels._conv.tiles import read
from pallas_kernels._hopper import CHUNK, ROWS


@dataclass(frozen=True)
class Edges:
    """What each output holds in the chunks that a kernel is not given: the neighbour's part of its row's last one.

    Attributes:
      flat: how rows lie.
      given: [row, step] in device memory, for each output.
      arrived: the same of a tile's neighbour in shared memory [stage, output, step], as `load` puts it there; None if
        `join` reads device memory.
    """

    flat: FlatRows
    given: Sequence[Any]
    arrived: Any

    def load(self, line: Array, slot: Array, barrier: Any) -> None:
        """Copies of what lies next to a row, one for each output, to where `join` reads them."""
        if self.arrived is None:
            return
        for i in range(len(self.given)):
            plgpu.copy_gmem_to_smem(self._neighbour(i, line), self.arrived.at[slot, i], barrier)

    def join(self, i: int, y: Array, line: Array, tile: Array, slot: Array) -> Array:
        """Output i of a tile with the neighbour's steps where they lie in it."""
        if self.arrived is None:
            return jnp.where(
                _own_steps(self.flat, line, tile), y, _for_all_chunks(self._neighbour(i, line), y)
            )

        def join(_: Any, y: Array) -> Array:
            other = _for_all_chunks(self.arrived.at[slot, i], y)
            return jnp.where(_steps_up_to_neighbour(self.flat, line, tile), y, other)

        return lax.fori_loop(0, self.flat.is_shared(line, tile).astype(jnp.int32), join, y)

    def _neighbour(self, i: int, line: Array) -> Any:
        return self.given[i].at[self.flat.neighbour(line, self.given[i].shape[0])]


def _for_all_chunks(ref: Any, like: Array) -> Array:
    steps = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(steps, (ROWS, CHUNK), (1,)).astype(like.dtype)


def clear_or_mask(
    refs: Sequence[Any], flat: FlatRows, line: Array, tile: Array, masked: bool
) -> Callable[..., tuple[Array, ...]] | None:
    """What puts zeros into tiles where steps are not the row's; None if they are in shared memory already."""
    if masked:
        return partial(_masked, flat, line, tile)
    _clear(refs, flat, line, tile)
    return None


def _clear(refs: Sequence[Any], flat: FlatRows, line: Array, tile: Array) -> None:
    """Zeros in shared memory where steps of a tile are not the row's."""

    @pl.when(flat.is_end(line, tile))
    def _() -> None:
        own = _own_steps(flat, line, tile)
        for ref in refs:
            z = read(ref)
            ref[...] = jnp.where(own, z, jnp.zeros_like(z))
        plgpu.commit_smem()  # A later load overwrites them by another way.


def _own_steps(flat: FlatRows, line: Array, tile: Array) -> Array:
    """Which steps of a tile are the row's."""
    chunk, step = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    at, (first, stop) = CHUNK * chunk + step, flat.own(line, tile)
    return (at >= first) & (at < stop)


def _masked(flat: FlatRows, line: Array, tile: Array, *given: Array) -> tuple[Array, ...]:
    """Tiles with zeros where steps are not the row's."""

    def mask(_: Any, given: tuple[Array, ...]) -> tuple[Array, ...]:
        own = _steps_up_to_neighbour(flat, line, tile)
        if flat.reverse:
            own &= _steps_before(flat.own(line, tile)[1])
        return tuple(jnp.where(own, z, jnp.zeros_like(z)) for z in given)

    return lax.fori_loop(0, flat.is_shared(line, tile).astype(jnp.int32), mask, given)


def _steps_up_to_neighbour(flat: FlatRows, line: Array, tile: Array) -> Array:
    """Which steps of a tile the walk meets before those of the neighbour behind the row."""
    first, stop = flat.own(line, tile)
    return ~_steps_before(first) if flat.reverse else _steps_before(stop)


def _steps_before(end: Array) -> Array:
    """Steps of a tile before one. Within a chunk they are compared, where two chunks of a thread share them."""
    chunk, step = (
        plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    return step < end - CHUNK * chunk


def store_chunks(tiles: Any, results: Sequence[Any], start: Array, count: Array) -> None:
    """The first chunks of plain tiles, at most 64: the sizes of copies are fixed, so one for each bit of `count`."""
    size = ROWS
    while size:
        done = count // (2 * size) * (2 * size)

        @pl.when(count // size % 2 == 1)
        def _(size: int = size, done: Array = done) -> None:
            for i, result in enumerate(results):
                plgpu.copy_smem_to_gmem(tiles.at[i, pl.ds(done, size)], result.at[pl.ds(start + done, size)])

        size //= 2
