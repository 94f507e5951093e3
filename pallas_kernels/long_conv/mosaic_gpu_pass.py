"""The Hopper kernel: rows of up to 16,384 steps go from device memory to device memory once.

A program takes one channel and walks over its rows; its warpgroups take them in turn, each on its own. A row of C
tiles is C transforms of 64 x 64 complex points, one for each class of frequencies (`mosaic_gpu_tables`):

    U = sum_m turn_j[m] u_m        Z = twiddle_j * (F U)        P = H_j * (Z F)
    W = twiddle_j^* * (P F^*)      V = F^* W                    y_m = sum_j Re(turn_j[m]^* V)

Each of the four products is 64 x 64 x 64, eight times for real and imaginary parts. Operands are fp16 and lie in shared
memory, left ones too; sums are fp32 and stay in registers for what is done to their elements.

The norm of a row changes in no stage. A row is scaled by the power of two that keeps it below 2^14.

Rows whose length is no multiple of 512 may stay where they are (`mosaic_gpu_flat`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.tiles import chunks_ref, read, zeros
from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.hopper import Ring
from pallas_kernels.long_conv.mosaic_gpu_flat import Flat, FlatTile, count_boxes
from pallas_kernels.long_conv.mosaic_gpu_launch import launch, load_constants
from pallas_kernels.long_conv.mosaic_gpu_products import (
    Complex,
    Dft,
    by_column,
    by_row,
    from_left,
    from_right,
    parts_of,
    product,
    row_scales,
    spread,
    store,
    times,
)
from pallas_kernels.long_conv.mosaic_gpu_tables import tables

WORKERS = {1: 3, 2: 2, 3: 1, 4: 1}
"""Warpgroups whose rows fit into shared memory, by classes."""


class Call(NamedTuple):
    """The static part of a program.

    Attributes:
      rows: of a program.
      inputs: how many streams are multiplied, x and pre_gate.
      dtype: of products element by element.
      flat: rows that lie one behind another, None for a matrix each.
    """

    ring: Ring
    channels: int
    rows: int
    inputs: int
    gated: bool
    workers: int
    dtype: Any
    flat: Flat | None = None

    @property
    def tiles(self) -> int:
        """The unit that warpgroups take in turn: a row of C tiles, or a tile of several rows."""
        return self.rows // self.ring.together

    @property
    def boxes(self) -> int:
        """Copies of one stream a turn."""
        return count_boxes(self.ring, self.flat)


class Shared(NamedTuple):
    """Shared memory: streams and operands of each warpgroup, what all read, and when it is there.

    The last of the streams is post_gate, which y replaces.
    """

    streams: Any
    operands: Any
    sizes: Any
    matrices: Any
    twiddles: Any
    turns: Any
    shifts: Any
    spectrum: Any
    inverse: Any
    ready: Any
    came: Any
    post_came: Any


def convolve(
    ring: Ring,
    spectrum: Float[Array, "D P 64 64"],
    inverse: Float[Array, "D 64"],
    x: Float[Array, "R N 64"] | Float[Array, "B D T"],
    pre_gate: Float[Array, "R N 64"] | Float[Array, "B D T"] | None,
    post_gate: Float[Array, "R N 64"] | Float[Array, "B D T"] | None,
    *,
    interpret: bool,
    dtype: Any = jnp.float32,
    flat: Flat | None = None,
) -> Float[Array, "R N 64"] | Float[Array, "B D T"]:
    """Return post_gate Re(A^H (H A (pre_gate x))) of rows in chunks.

    `mosaic_gpu_tables.spectrum` explains the first two. `flat` rows are not in chunks, and neither is the result.
    """
    channels, given = spectrum.shape[0], [z for z in (x, pre_gate, post_gate) if z is not None]
    batch = (x.shape[0] if flat is None else flat.rows) // channels
    rows = rows_per_program(batch // ring.together, channels) * ring.together
    workers = min(WORKERS[ring.classes], rows // ring.together)
    inputs = 1 if pre_gate is None else 2
    call = Call(ring, channels, rows, inputs, post_gate is not None, workers, dtype, flat)
    constants = [jnp.asarray(table) for table in tables(ring) if table is not None]
    streams = given if flat is None else [z for stream in given for z in flat.enter(stream)]
    found = launch(
        partial(_program, call=call),
        (*streams, *constants, spectrum, inverse),
        jax.typeof(x) if flat is None else tuple(jax.typeof(z) for z in streams[: flat.arrays]),
        _scratch(call, constants),
        grid=(channels, batch // rows),
        workers=workers,
        name=str(ring.points) if flat is None else f"{ring.points}_flat",
        interpret=interpret,
    )
    return found if flat is None else flat.leave(found, x.shape)


def _scratch(call: Call, constants: Sequence[Array]) -> Shared:
    matrices, twiddles, turns, *shifts = (z.shape for z in constants)
    workers, classes, half = call.workers, call.ring.classes, jnp.float16
    copies = matrices[0] + twiddles[0] + 2 * classes + 2 + len(shifts)
    stream_ref = tile_ref if call.flat is None else chunks_ref
    return Shared(
        streams=stream_ref(workers, call.inputs + 1, classes, ROWS, CHUNK, dtype=jnp.bfloat16),
        operands=tile_ref(workers, 2, ROWS, CHUNK, dtype=half),
        sizes=plgpu.SMEM((workers, ROWS), jnp.float32),
        matrices=tile_ref(*matrices, dtype=half),
        twiddles=tile_ref(*twiddles, dtype=half),
        turns=plgpu.SMEM(turns, half),
        shifts=plgpu.SMEM(shifts[0], jnp.float32) if shifts else None,
        spectrum=tile_ref(2 * classes, ROWS, CHUNK, dtype=half),
        inverse=plgpu.SMEM((ROWS,), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=copies),
        came=plgpu.Barrier(num_arrivals=call.inputs * call.boxes, num_barriers=workers),
        post_came=plgpu.Barrier(num_arrivals=call.boxes, num_barriers=workers),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one channel of `rows` rows."""
    count, shared = call.inputs + call.gated, refs[-1]
    each = 1 if call.flat is None else call.flat.arrays
    groups = [refs[i * each : (i + 1) * each] for i in range(count)]
    y, rest = refs[-1 - each : -1], refs[count * each : -1 - each]
    matrices, twiddles, turns, *shifts, spectrum, inverse = rest
    channel, worker = lax.axis_index("channel"), lax.axis_index("warpgroup")

    own = (spectrum.at[channel], shared.spectrum)
    vectors = [(turns, shared.turns), (inverse.at[channel], shared.inverse)]
    vectors += [(source, shared.shifts) for source in shifts]
    load_constants(
        worker, [(matrices, shared.matrices), (twiddles, shared.twiddles), own], vectors, shared.ready
    )
    turns_left = (call.tiles - worker + call.workers - 1) // call.workers
    row = _Row(call, groups, y, shared, worker, turns_left)
    row.load_inputs(worker * 0)
    plgpu.barrier_wait(shared.ready)
    lax.fori_loop(0, turns_left, lambda step, _: row.convolve(step), None)
    plgpu.wait_smem_to_gmem(0)


class _Row(NamedTuple):
    """The rows that one warpgroup takes.

    A stream, and y, is one array, or as many as `Flat.arrays`.
    """

    call: Call
    streams: Sequence[Sequence[Any]]
    y: Sequence[Any]
    shared: Shared
    worker: Array
    steps: Array

    def load_inputs(self, step: Array) -> None:
        """Load x and pre_gate of a turn."""
        for i in range(self.call.inputs):
            self._load(i, step, self.shared.came)

    def _load(self, stream: int, step: Array, barrier: Any) -> None:
        arrays, came = self.streams[stream], barrier.at[self.worker]
        if self.call.flat is not None:
            for m in range(self.call.ring.classes):
                self._flat(step).load(arrays, self.shared.streams.at[self.worker, stream, m], m, came)
            return
        for box, place in self._boxes(arrays[0], stream, step):
            plgpu.copy_gmem_to_smem(box, place, came)

    def convolve(self, step: Array) -> None:
        """Convolve one turn, and load the next."""
        call, shared = self.call, self.shared
        plgpu.barrier_wait(shared.came.at[self.worker])
        scale, inverse = self._scales()
        start = tuple(zeros() for _ in range(call.ring.classes))
        sums = lax.fori_loop(0, call.ring.classes, lambda j, sums: self._class(j, sums, scale, step), start)
        if call.gated:
            plgpu.barrier_wait(shared.post_came.at[self.worker])
        inverse = spread(inverse * by_row(shared.inverse))
        for m, total in enumerate(sums):
            place = shared.streams.at[self.worker, call.inputs, m]
            out = total * inverse
            out = out * read(place).astype(jnp.float32) if call.gated else out
            place[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        if call.flat is not None:
            for m in range(call.ring.classes):
                self._flat(step).store(self.y, shared.streams.at[self.worker, call.inputs, m], m)
            return
        for box, place in self._boxes(self.y[0], call.inputs, step):
            plgpu.copy_smem_to_gmem(place, box)

    def _boxes(self, array: Any, stream: int, step: Array) -> list[tuple[Any, Any]]:
        """Return where a turn's chunks lie in device memory and in shared memory."""
        ring, found, first = self.call.ring, [], self._first(step)
        for i in range(ring.together):
            row = (first + i) * self.call.channels + lax.axis_index("channel")
            for m in range(ring.classes):
                # Keep the start unknown to Pallas, which refuses a box that reaches past the row's end.
                chunks = pl.ds(step * 0 + m * ROWS, ring.height)
                place = self.shared.streams.at[self.worker, stream, m]
                place = place if ring.together == 1 else place.at[pl.ds(i * ring.height, ring.height)]
                found.append((array.at[row, chunks], place))
        return found

    def _first(self, step: Array) -> Array:
        """Return the first of the channel's rows that a turn takes."""
        first = lax.axis_index("rows") * self.call.rows
        return first + (self.worker + step * self.call.workers) * self.call.ring.together

    def _flat(self, step: Array) -> FlatTile:
        assert self.call.flat is not None
        return FlatTile(self.call.flat, self.call.channels, self._first(step))

    def _input(self, m: int) -> Array:
        """Return u = pre_gate x of a tile, in fp32."""
        x, *gates = (
            read(self.shared.streams.at[self.worker, i, m]).astype(jnp.float32)
            for i in range(self.call.inputs)
        )
        return x * gates[0] if gates else x

    def _scales(self) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
        """Return the power of two that each row of a tile is scaled by, and one over it."""
        ring, sizes = self.call.ring, self.shared.sizes.at[self.worker]
        return row_scales((self._input(m) for m in range(ring.classes)), sizes, ring)

    def _class(self, j: Array, sums: tuple[Array, ...], scale: Array, step: Array) -> tuple[Array, ...]:
        """Return the sums with what frequencies of class j add."""
        call, shared = self.call, self.shared
        operands = [shared.operands.at[self.worker, i] for i in range(2)]
        first, last = (Dft(shared.matrices.at[i]) for i in (0, shared.matrices.shape[0] - 1))
        store(operands, self._turned(j, scale, step))
        pl.when(j == 0)(lambda: self._free_output(step))
        pl.when((j == call.ring.classes - 1) & (step + 1 < self.steps))(lambda: self.load_inputs(step + 1))
        store(operands, self._twiddled(from_left(first, operands), j))
        found = from_right(operands, last)
        store(operands, times(found, parts_of(shared.spectrum, j), dtype=call.dtype))
        back = from_right(operands, last.conjugate())
        store(operands, self._twiddled(back, j, conjugated=True))
        back = from_left(first.conjugate(), operands)
        added = []
        for m, total in enumerate(sums):
            turn = self._turn(j, m)
            real, imaginary = back if call.flat is None else self._flat(step).turned_back(back, m)
            added.append(total + real * spread(turn[0]) + imaginary * spread(turn[1]))
        return tuple(added)

    def _turned(self, j: Array, scale: Array, step: Array) -> tuple[Array, Array]:
        """Return U of class j."""
        total: list[Any] = [None, None]
        for m in range(self.call.ring.classes):
            u = self._input(m)
            if self.call.flat is not None and m == 0:
                total = [*self._flat(step).turned(u, [turn * scale for turn in self._turn(j, m)])]
                continue
            for part, turn in enumerate(self._turn(j, m)):
                more = u * spread(turn * scale)
                total[part] = more if m == 0 else total[part] + more
        return total[0], total[1]

    def _twiddled(self, z: Complex, j: Array, *, conjugated: bool = False) -> Complex:
        """Return Z times the twiddles of class j, or their conjugates."""
        twiddles, shifts, dtype = self.shared.twiddles, self.shared.shifts, self.call.dtype
        turned = times(z, parts_of(twiddles, j if shifts is None else 0), conjugated=conjugated, dtype=dtype)
        if shifts is None:
            return turned
        columns = [by_column(part) for part in parts_of(shifts, j)]
        return product(turned, columns, conjugated=conjugated, dtype=dtype)

    def _turn(self, j: Array, m: int) -> list[Float[Array, "64"]]:
        at = 2 * (j * self.call.ring.classes + m)
        return [by_row(self.shared.turns.at[at + part]).astype(jnp.float32) for part in range(2)]

    def _free_output(self, step: Array) -> None:
        """Wait until the last turn's y has left its place, for which post_gate may come."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.call.gated:
            self._load(self.call.inputs, step, self.shared.post_came)
