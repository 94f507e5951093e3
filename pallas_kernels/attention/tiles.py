"""Parts of the Hopper kernel: tiles in shared memory, and products of them on tensor cores."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.hopper import ROWS, TILE
from pallas_kernels.attention.masks import Mask

LOG2E = math.log2(math.e)

BY_ROW = plgpu.Layout.WGMMA.reduce(1)


class Call(NamedTuple):
    """The facts that a program is compiled with.

    Attributes:
      causal: as of the mask.
      keys: S.
      runs: rows of queries to a row of keys.
      ratio: heads of queries to a head of keys.
      tiles: of queries.
      width: K.
      scale: of the scores.
      limited: lengths of keys are given.
      simulated: without products whose left operand is in registers.
    """

    causal: bool
    keys: int
    runs: int
    ratio: int
    tiles: int
    width: int
    scale: float
    limited: bool
    simulated: bool


def call_of(q: Any, k: Any, mask: Mask, scale: float | None, interpret: Any) -> Call:
    """Return the static side of a call of the kernel."""
    return Call(
        causal=mask.interval.causal,
        keys=k.shape[1],
        runs=q.shape[0] // k.shape[0],
        ratio=q.shape[2] // k.shape[2],
        tiles=-(-q.shape[1] // TILE),
        width=q.shape[3],
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        limited=mask.kv_lengths is not None,
        simulated=interpret is not None,
    )


def limits(mask: Mask, keys: int) -> list[Int[Array, "B"]]:
    """Return lengths of keys where they are given, within bounds."""
    return [] if mask.kv_lengths is None else [jnp.clip(mask.kv_lengths, 0, keys).astype(jnp.int32)]


class Stages(NamedTuple):
    """Places in shared memory, one tile of each array in a place; when they are there, and when it is free again."""

    tiles: tuple[Any, ...]
    there: Any
    free: Any


def stages(count: int, *tiles: Any) -> Stages:
    """Return scratch for `count` places that two warpgroups read."""
    there = plgpu.Barrier(num_arrivals=len(tiles), num_barriers=count)
    return Stages(tiles, there, plgpu.Barrier(num_arrivals=2, num_barriers=count))


def matrix(x: Float[Array, "B T H K"]) -> Float[Array, "B padded H*K"]:
    """Lay heads side by side, and pad to a multiple of 8 rows, as the copy engine wants it."""
    return jnp.pad(x.reshape(*x.shape[:2], -1), ((0, 0), (0, -x.shape[1] % 8), (0, 0)))


def per_query(x: Float[Array, "B H T"]) -> Float[Array, "B H padded"]:
    """Return one number for each query of a whole number of tiles."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % TILE)))


def feed(walked: Sequence[Stages], boxes: Callable[[Any], Sequence[Sequence[Any]]], steps: Array) -> None:
    """Copy what `boxes` names at each step to its place as soon as that is free, and sees all places free again."""
    count = walked[0].tiles[0].shape[0]

    def advance(step: Array, _: None) -> None:
        slot = step % count
        for stage, sources in zip(walked, boxes(step), strict=True):
            pl.when(step >= count)(lambda stage=stage: plgpu.barrier_wait(stage.free.at[slot]))
            for source, tile in zip(sources, stage.tiles, strict=True):
                plgpu.copy_gmem_to_smem(source, tile.at[slot], stage.there.at[slot])

    def drain(step: Array, _: None) -> None:
        for stage in walked:
            plgpu.barrier_wait(stage.free.at[step % count])

    lax.fori_loop(0, steps, advance, None)
    lax.fori_loop(jnp.maximum(steps - count, 0), steps, drain, None)


def across(x: Array, width: int) -> Array:
    """Return one number a row in each column."""
    return lax.broadcast_in_dim(x, (x.shape[0], width), [0])


def by_row(x: Any) -> Array:
    """Load a vector from memory, one number for each row of a product."""
    return plgpu.load(x, layout=BY_ROW, optimized=False)


def constants(value: float) -> Float[Array, "64"]:
    """Return the same number for each row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), BY_ROW)


def zeros(width: int) -> Float[Array, "64 K"]:
    """Return an accumulator."""
    return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)


def indices(width: int, axis: int) -> Int[Array, "64 K"]:
    """Return the indices of the rows (0) or columns (1) of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, width), axis, layout=plgpu.Layout.WGMMA)


def visible(first: Array, start: Array, limit: Array, causal: bool) -> Bool[Array, "64 128"]:
    """Return which of the keys from `start` on the queries from `first` on see."""
    last = limit - 1 - start
    if causal:
        last = jnp.minimum(indices(TILE, 0) + (first - start), last)
    return indices(TILE, 1) <= last


def product(left: Any, right: Any) -> Array:
    """Return left @ right in fp32, both in shared memory."""

    def multiply(total: Any) -> Array:
        plgpu.wgmma(total, left, right)
        return total[...]

    shape = (left.shape[0], right.shape[1])
    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(total: Array, left: Array, right: Any, simulated: bool) -> Array:
    """Return total + left @ right, of which only `right` is in shared memory."""
    if simulated:
        found = total + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # Read by threads here: before the copy engine writes there, it has to be told.
        return found

    def multiply(ref: Any) -> None:
        plgpu.wgmma(ref, left, right)

    run: Any = pl.run_state(multiply)
    return run(plgpu.WGMMAAccumulatorRef.init(total))
