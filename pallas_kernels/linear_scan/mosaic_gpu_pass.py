"""One walk of the Hopper kernel along time, or against it: what a thread does to its column, tile after tile.

A program is one warpgroup. Each of its threads owns a column, walks down its steps and keeps the state in a register.
Tiles [rows, steps, columns] arrive by TMA several ahead and leave by TMA, so device memory sees whole lines and
neighbouring threads read neighbouring words of shared memory. Nothing passes between threads.

A row may be cut into pieces, each a program of its own. A piece then needs the state at its edge, which the walk over
its effect (no outputs but the last states) and a short scan over pieces give.

The automatic barriers around stores to shared memory are off: no thread reads what it stores, and tiles change hands
only behind `wait_smem_to_gmem` and `commit_smem`, which are barriers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import mosaic_kernel
from pallas_kernels.linear_scan.hopper import LANES, STEPS, Grid

SHARED = 108 * 1024
"""Bytes of shared memory for tiles, so that two programs fit on a multiprocessor."""

GROUP = 8
"""Steps whose values are read from shared memory before the first of them is used."""

Step = Callable[[tuple[Array, ...], tuple[Array, ...]], tuple[tuple[Array, ...], tuple[Array, ...]]]
"""(states, values of the streams) -> (states, values of the outputs), all fp32, elementwise."""


@dataclass(frozen=True)
class Walk:
    """The work of one pass.

    Attributes:
      name: of the kernel.
      step: what happens at a step.
      states: how many states a column has.
      grid: how rows lie on programs.
      reverse: against time.
      neighbour: the last stream is read one step further along the walk; `beyond` stands behind the row's last step.
      interpret: run on the CPU in Pallas' simulation of a GPU.
    """

    name: str
    step: Step
    states: int
    grid: Grid
    reverse: bool
    neighbour: bool = False
    interpret: bool = False


def run(
    walk: Walk,
    streams: Sequence[Float[Array, "_ T D"]],
    outputs: Sequence[Any],
    *,
    start: Float[Array, "S P D"] | None = None,
    beyond: Float[Array, "S 1 D"] | None = None,
) -> tuple[list[Float[Array, "S T D"]], list[Float[Array, "S P D"]]]:
    """Walk each piece of each row.

    Args:
      walk: see `Walk`.
      streams: inputs; one of fewer rows is shared by those that have the same number modulo its rows.
      outputs: dtypes of the output streams.
      start: the last state before each piece, zero if None. All other states start from 1.
      beyond: see `Walk.neighbour`; zero if None.

    Returns:
      The output streams, and the states behind each piece.
    """
    grid = walk.grid
    rows, length, width = streams[-1].shape
    blocks = -(-width // grid.columns)
    box = (grid.rows, STEPS, grid.columns)
    edge = (grid.rows, grid.columns)
    stages = _stages([z.dtype for z in streams], outputs)
    edges = [z for z in (start, beyond) if z is not None]
    like = streams[-1]
    # Widen to whole blocks: a copy of one row's columns is not clipped at the row's end.
    last = varying_like(like, (rows, grid.pieces, blocks * grid.columns), jnp.float32)
    results = mosaic_kernel(
        partial(
            _program,
            walk=walk,
            has=(start is not None, beyond is not None),
            counts=(len(streams), len(outputs)),
        ),
        out_type=[varying_like(like, (rows, length, width), dtype) for dtype in outputs]
        + [last] * walk.states,
        grid=(blocks, -(-rows // grid.rows), grid.pieces),
        grid_names=("block", "rows", "piece"),
        scratch_types=[
            [plgpu.SMEM((stages, *box), z.dtype) for z in streams],
            [plgpu.SMEM((2, *box), dtype) for dtype in outputs],
            [plgpu.SMEM(edge, jnp.float32) for _ in range(len(edges) + walk.states)],
            [plgpu.SMEM((stages, *edge), jnp.float32)] if walk.neighbour else [],
            plgpu.Barrier(num_arrivals=len(streams) + walk.neighbour, num_barriers=stages),
            plgpu.Barrier(num_arrivals=max(1, len(edges))),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=plgpu.InterpretGPUParams() if walk.interpret else None,
        kernel_name=walk.name,
    )(*streams, *edges)
    return results[: len(outputs)], [z[..., :width] for z in results[len(outputs) :]]


def _stages(streams: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return tiles of each stream that arrive at a time.

    They take what two tiles of each output leave room for.
    """
    arriving, leaving = (
        LANES * STEPS * sum(jnp.dtype(d).itemsize for d in dtypes) for dtypes in (streams, outputs)
    )
    return (SHARED - 2 * leaving) // arriving


def _program(*refs: Any, walk: Walk, has: tuple[bool, bool], counts: tuple[int, int]) -> None:
    """Run one piece of `grid.rows` rows, `grid.columns` columns."""
    *arrays, loaded, stored, edges, beside, arrived, ready = refs
    grid = walk.grid
    streams, arrays = arrays[: counts[0]], arrays[counts[0] :]
    given, arrays = arrays[: sum(has)], arrays[sum(has) :]
    outputs, lasts = arrays[: counts[1]], arrays[counts[1] :]
    length, stages = streams[-1].shape[1], loaded[0].shape[0]
    row, piece = lax.axis_index("rows") * grid.rows, lax.axis_index("piece")
    columns = pl.ds(lax.axis_index("block") * grid.columns, grid.columns)
    first = piece * grid.tiles
    count = jnp.minimum(grid.tiles, -(-length // STEPS) - first)

    def start_of(k: Array) -> Array:
        """Return the first step of the k-th tile of the walk."""
        return (first + (count - 1 - k if walk.reverse else k)) * STEPS

    def load(k: Array) -> None:
        slot, start = k % stages, start_of(k)
        for stream, tiles in zip(streams, loaded, strict=True):
            rows = pl.ds(row % stream.shape[0], grid.rows)
            box = stream.at[rows, pl.ds(start, STEPS), columns]
            plgpu.copy_gmem_to_smem(box, tiles.at[slot], arrived.at[slot])
        if walk.neighbour:
            step = jnp.maximum(start - 1, 0) if walk.reverse else jnp.minimum(start + STEPS, length - 1)
            box = streams[-1].at[pl.ds(row, grid.rows), step, columns]
            plgpu.copy_gmem_to_smem(box, beside[0].at[slot], arrived.at[slot])

    def store(k: Array, steps: int) -> None:
        for tile, output in zip(stored, outputs, strict=True):
            part = tile.at[k % 2] if steps == STEPS else tile.at[k % 2, :, :steps]
            plgpu.copy_smem_to_gmem(
                part, output.at[pl.ds(row, grid.rows), pl.ds(start_of(k), steps), columns]
            )

    # Copy the rest of a tile of one row apart if the tile is as wide as the row: as plain memory it is clipped at the
    # array's end, not at the row's. Leave all others whole: a single step is plain memory too, and would not be clipped
    # at the width.
    rest = length % STEPS if streams[-1].shape[2] == LANES else 0

    def advance(k: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
        plgpu.barrier_wait(arrived.at[k % stages])
        plgpu.wait_smem_to_gmem(len(outputs), wait_read_only=True)
        tile = _Tile(
            walk, length, start_of(k), [z.at[k % stages] for z in loaded], [z.at[k % 2] for z in stored]
        )
        after = _read(beside[0].at[k % stages]) if walk.neighbour else None
        states = tile.walk(states, after, beyond)
        plgpu.commit_smem()
        pl.when(k + stages < count)(lambda: load(k + stages))
        if rest and outputs:
            whole = start_of(k) + STEPS <= length
            pl.when(whole)(lambda: store(k, STEPS))
            pl.when(~whole)(lambda: store(k, rest))
        else:
            store(k, STEPS)
        return states

    for k in range(stages):
        pl.when(k < count)(partial(load, jnp.int32(k)))
    for array, edge, at in zip(given, edges[: len(given)], [piece] * has[0] + [0] * has[1], strict=True):
        plgpu.copy_gmem_to_smem(array.at[pl.ds(row, grid.rows), at, columns], edge, ready)
    if given:
        plgpu.barrier_wait(ready)
    start = _read(edges[0]) if has[0] else _constant(grid, 0.0)
    beyond = _read(edges[len(given) - 1]) if has[1] else _constant(grid, 0.0)
    states = (*(_constant(grid, 1.0) for _ in range(walk.states - 1)), start)
    states = lax.fori_loop(0, count, advance, states)
    for state, edge in zip(states, edges[len(given) :], strict=True):
        edge[...] = state
    plgpu.commit_smem()
    for last, edge in zip(lasts, edges[len(given) :], strict=True):
        plgpu.copy_smem_to_gmem(edge, last.at[pl.ds(row, grid.rows), piece, columns])
    plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Tile:
    """A tile in shared memory: where it begins, its inputs and its outputs."""

    of: Walk
    length: int
    start: Array
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def walk(self, states: tuple[Array, ...], after: Any, beyond: Array) -> tuple[Array, ...]:
        """Walk all steps, in groups whose values are read first.

        `after` is the neighbour behind the tile's last step.
        """
        sign = -1 if self.of.reverse else 1
        ahead = self.of.neighbour

        def walk_group(j: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
            first = STEPS - 1 - j * GROUP if self.of.reverse else j * GROUP
            now = [first + sign * i for i in range(GROUP)]
            values = [[_read(ref.at[:, i]) for ref in self.inputs[: len(self.inputs) - ahead]] for i in now]
            if ahead:
                # Read anything at the tile's last step, and do not use it: its neighbour lies elsewhere.
                following = [_read(self.inputs[-1].at[:, jnp.clip(i + sign, 0, STEPS - 1)]) for i in now]
                following[-1] = jnp.where(j == STEPS // GROUP - 1, after, following[-1])
                for i, value, neighbour in zip(now, values, following, strict=True):
                    value.append(jnp.where(self.start + i == self._end(), beyond, neighbour))
            for i, value in zip(now, values, strict=True):
                states, results = self._step(i, states, value)
                for ref, result in zip(self.outputs, results, strict=True):
                    ref[:, i] = result.astype(ref.dtype)
            return states

        return lax.fori_loop(0, STEPS // GROUP, walk_group, states)

    def _end(self) -> int:
        """Return the last step of the row's walk."""
        return 0 if self.of.reverse else self.length - 1

    def _step(self, i: Array, states: tuple[Array, ...], values: Sequence[Array]) -> Any:
        """Take one step.

        Steps behind the row's end change no state: what lies there is no number of the row's.
        """
        new, results = self.of.step(states, tuple(values))
        if self.length % STEPS:
            inside = self.start + i < self.length
            new = tuple(jnp.where(inside, x, y) for x, y in zip(new, states, strict=True))
        return new, results


def _layout(*shape: int) -> Any:
    """Return the layout with a thread for each column."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _read(ref: Any) -> Array:
    """Read one value a thread, in fp32."""
    return plgpu.load(ref, layout=_layout(*ref.shape)).astype(jnp.float32)


def _constant(grid: Grid, value: float) -> Array:
    shape = (grid.rows, grid.columns)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), _layout(*shape))
