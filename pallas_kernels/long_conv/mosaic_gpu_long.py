"""The Hopper kernel of rows of up to 32,768 steps: two warpgroups share a row, whose C tiles fill shared memory.

As in `mosaic_gpu_pass`, a row of C tiles is C transforms of 64 x 64 complex points. Here all lie in shared memory at
once, class j where tile j came in, and the spectrum of a class comes from device memory for each row. Tiles and
classes are dealt to warpgroups in turn. Between these steps each warpgroup waits for the other:

    u_m of own tiles, and their largest number      U_j of own classes, from all u
    own classes there and back, in place            y_m of own tiles, from all V_j

For gradients (`mosaic_gpu_long_backward`) a row may be convolved by conj(H), multiplied by two gates, and its spectrum
kept: each class's U leaves from where H came in.
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

from pallas_kernels._conv.tiles import read, zeros
from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program, varying_like
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.hopper import Ring
from pallas_kernels.long_conv.mosaic_gpu_launch import launch
from pallas_kernels.long_conv.mosaic_gpu_products import (
    Complex,
    Dft,
    by_column,
    by_row,
    from_left,
    from_right,
    parts_of,
    product,
    scales,
    spread,
    store,
    times,
)
from pallas_kernels.long_conv.mosaic_gpu_tables import tables_of_long_rows

WORKERS = 2


class Call(NamedTuple):
    """The static part of a program.

    Attributes:
      rows: of a program.
      inputs: how many streams are multiplied to be convolved, one or two.
      gates: how many streams the convolution is multiplied by, a result each; without one it is the result.
      dtype: of what is done element by element between products.
      adjoint: convolve by conj(H).
      kept: spectra of rows, and one over their scales, are results too.
    """

    ring: Ring
    channels: int
    rows: int
    inputs: int
    gates: int
    dtype: Any
    adjoint: bool = False
    kept: bool = False

    @property
    def results(self) -> int:
        return max(self.gates, 1)

    @property
    def free(self) -> int:
        """Places of a tile, of two, that no result leaves from."""
        return 2 - self.results


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      tiles: [C, 2]: x and pre_gate, u, a class's real and imaginary part, post_gate, y; two gates and their results.
      spectra: of each warpgroup's class: H, then U if it is kept.
    """

    tiles: Any
    spectra: Any
    sizes: Any
    matrix: Any
    twiddles: Any
    shifts: Any
    turns: Any
    roots: Any
    inverse: Any
    ready: Any
    came: Any
    post_came: Any
    spectrum_came: Any
    met: Any


def convolve_long(
    ring: Ring,
    spectrum: Float[Array, "D P 64 64"],
    inverse: Float[Array, "D 64"],
    x: Float[Array, "R N 64"],
    pre_gate: Float[Array, "R N 64"] | None,
    post_gate: Float[Array, "R N 64"] | None,
    *,
    interpret: bool,
    dtype: Any = jnp.float32,
) -> Float[Array, "R N 64"]:
    """Convolve as `mosaic_gpu_pass.convolve` does.

    There is an even number of classes, the last two not empty.
    """
    inputs, gates = ([z for z in streams if z is not None] for streams in ((x, pre_gate), (post_gate,)))
    options: Any = {"name": str(ring.points), "interpret": interpret, "dtype": dtype}
    return run_long(ring, spectrum, inverse, inputs, gates, **options)[0]


def run_long(
    ring: Ring,
    spectrum: Float[Array, "D P 64 64"],
    inverse: Float[Array, "D 64"],
    inputs: Sequence[Float[Array, "R N 64"]],
    gates: Sequence[Float[Array, "R N 64"]],
    *,
    name: str,
    interpret: bool,
    dtype: Any = jnp.float32,
    adjoint: bool = False,
    kept: bool = False,
) -> list[Array]:
    """Convolve the product of `inputs`, times each gate, and return it and what is kept.

    See `Call`. Spectra are [R, 2 C, 64, 64] in fp16, as in `mosaic_gpu_tables.spectrum`, and one over their scales is
    [R].
    """
    channels, x = spectrum.shape[0], inputs[0]
    batch = x.shape[0] // channels
    rows = rows_per_program(batch, channels)
    call = Call(ring, channels, rows, len(inputs), len(gates), dtype, adjoint, kept)
    constants = [jnp.asarray(table) for table in tables_of_long_rows(ring)]
    like = [jax.typeof(x)] * call.results
    if kept:
        like.append(varying_like(x, (x.shape[0], *spectrum.shape[1:]), jnp.float16))
        like.append(varying_like(x, (x.shape[0], WORKERS, ROWS), jnp.float32))
    found = launch(
        partial(_program, call=call),
        (*inputs, *gates, *constants, spectrum, inverse),
        tuple(like),
        _scratch(call, constants),
        grid=(channels, batch // rows),
        workers=WORKERS,
        name=name,
        interpret=interpret,
    )
    return [*found[:-1], found[-1][:, 0, 0]] if kept else [*found]


def _scratch(call: Call, constants: Sequence[Array]) -> Shared:
    ring = call.ring
    matrix, twiddles, shifts, turns, roots = (z.shape for z in constants)
    half, own = jnp.float16, ring.classes // WORKERS
    return Shared(
        tiles=plgpu.RefUnion(
            tile_ref(ring.classes, 2, ROWS, CHUNK, dtype=jnp.bfloat16),
            tile_ref(ring.classes, 2, ROWS, CHUNK, dtype=half),
        ),
        spectra=tile_ref(WORKERS, 2, ROWS, CHUNK, dtype=half),
        sizes=plgpu.SMEM((WORKERS, ROWS), jnp.float32),
        matrix=tile_ref(*matrix, dtype=half),
        twiddles=tile_ref(*twiddles, dtype=half),
        shifts=plgpu.SMEM(shifts, jnp.float32),
        turns=plgpu.SMEM(turns, jnp.float32),
        roots=plgpu.SMEM(roots, jnp.float32),
        inverse=plgpu.SMEM((ROWS,), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=7),
        came=plgpu.Barrier(num_arrivals=call.inputs * own, num_barriers=WORKERS),
        post_came=plgpu.Barrier(num_arrivals=call.results * own, num_barriers=WORKERS),
        spectrum_came=plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS),
        met=plgpu.Barrier(num_arrivals=WORKERS),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one channel of `rows` rows."""
    count = call.inputs + call.gates
    streams, (matrix, twiddles, shifts, turns, roots, spectrum, inverse) = (
        refs[:count],
        refs[count : count + 7],
    )
    *found, shared = refs[count + 7 :]
    channel, worker = lax.axis_index("channel"), lax.axis_index("warpgroup")

    @pl.when(worker == 0)
    def _() -> None:
        whole = ((shifts, shared.shifts), (turns, shared.turns), (roots, shared.roots))
        tiles = [(matrix.at[0], shared.matrix.at[0])]
        tiles += [(twiddles.at[i], shared.twiddles.at[i]) for i in range(2)]
        for source, place in (*whole, *tiles, (inverse.at[channel], shared.inverse)):
            plgpu.copy_gmem_to_smem(source, place, shared.ready)

    row = _Row(call, streams, spectrum.at[channel], found, shared, worker)
    row.load_spectrum(worker * 0)
    row.load(worker * 0, range(call.inputs))
    plgpu.barrier_wait(shared.ready)
    lax.fori_loop(0, call.rows, lambda step, _: row.convolve(step), None)
    plgpu.wait_smem_to_gmem(0)


class _Row(NamedTuple):
    """The work of one of two warpgroups on a row."""

    call: Call
    streams: Sequence[Any]
    spectrum: Any
    found: Sequence[Any]
    shared: Shared
    worker: Array

    @property
    def own(self) -> int:
        """Tiles, and classes, of a warpgroup."""
        return self.call.ring.classes // WORKERS

    def load(self, step: Array, parts: Sequence[int]) -> None:
        """Load some of the streams that are convolved."""
        for part in parts:
            for i in range(self.own):
                self._load(self.streams[part], step, i, part, self.shared.came)

    def _load(self, stream: Any, step: Array, i: int, part: int, barrier: Any) -> None:
        place = self.shared.tiles[0].at[self._index(i), part]
        plgpu.copy_gmem_to_smem(self._box(stream, step, i), place, barrier.at[self.worker])

    def load_spectrum(self, i: Array) -> None:
        """Load H of the i-th own class."""
        for part in range(2):
            place = self.shared.spectra.at[self.worker, part]
            source = self.spectrum.at[2 * self._index(i) + part]
            plgpu.copy_gmem_to_smem(source, place, self.shared.spectrum_came.at[self.worker])

    def convolve(self, step: Array) -> None:
        """Convolve one row, and load the next."""
        inverse = self._enter()
        if self.call.kept:
            self.found[-1][self._row(step), self.worker] = inverse
        self._turn()
        lax.fori_loop(0, self.own, lambda i, _: self._class(i, step), None)
        self._meet()
        sums = self._restored()
        self._meet()
        self._leave(sums, spread(inverse * by_row(self.shared.inverse)), step)

    def _index(self, i: Any) -> Array:
        """Return the index of the i-th own tile or class."""
        return self.worker + WORKERS * i

    def _box(self, array: Any, step: Array, i: int) -> Any:
        return array.at[self._row(step), pl.ds(self._index(i) * ROWS, ROWS)]

    def _row(self, step: Array) -> Array:
        row = lax.axis_index("rows") * self.call.rows + step
        return row * self.call.channels + lax.axis_index("channel")

    def _meet(self) -> None:
        """Wait until both warpgroups have come here, and see what the other has written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.met)
        plgpu.barrier_wait(self.shared.met)

    def _tile(self, j: Any) -> list[Any]:
        return [self.shared.tiles[1].at[j, part] for part in range(2)]

    def _enter(self) -> Float[Array, "64"]:
        """Return u of own tiles, scaled, and one over the scale.

        The scale is the same in all rows of a tile.
        """
        shared = self.shared
        plgpu.barrier_wait(shared.came.at[self.worker])
        found, largest = [], None
        for i in range(self.own):
            parts = [shared.tiles[0].at[self._index(i), part] for part in range(self.call.inputs)]
            x, *gates = (read(part).astype(jnp.float32) for part in parts)
            found.append(x * gates[0] if gates else x)
            size = jnp.abs(found[-1])
            largest = size if largest is None else jnp.maximum(largest, size)
        assert largest is not None
        sizes = shared.sizes.at[self.worker]
        sizes[...] = jnp.max(largest, axis=1)
        self._meet()
        both = jnp.maximum(by_column(shared.sizes.at[0]), by_column(shared.sizes.at[1]))
        scale, inverse = scales(jnp.max(both, axis=1), self.call.ring.points)
        for i, u in enumerate(found):
            place = self._tile(self._index(i))[0]
            place[...] = (u * spread(scale)).astype(jnp.float16)
        self._meet()
        return inverse

    def _turn(self) -> None:
        """Put U of own classes, once all u are read."""
        u, dtype = [read(self._tile(m)[0]) for m in range(self.call.ring.classes)], self.call.dtype
        self._meet()

        def turned(i: Array, _: None) -> None:
            j = self._index(i)
            total: list[Any] = [zeros().astype(dtype)] * 2
            for m, z in enumerate(u):
                wide = z.astype(dtype)
                total = [sum_ + wide * root for sum_, root in zip(total, self._root(j, m), strict=True)]
            store(self._tile(j), product((total[0], total[1]), self._turns(j), dtype=dtype))

        lax.fori_loop(0, self.own, turned, None)

    def _root(self, j: Any, m: Any) -> list[Array]:
        at = 2 * (j * self.call.ring.classes + m)
        return [self.shared.roots[at + part].astype(self.call.dtype) for part in range(2)]

    def _turns(self, j: Array) -> list[Array]:
        return [spread(by_row(part).astype(self.call.dtype)) for part in parts_of(self.shared.turns, j)]

    def _class(self, i: Array, step: Array) -> None:
        """Put V of the i-th own class, turned back, in place of U."""
        shared, j, dtype = self.shared, self._index(i), self.call.dtype
        tile, dft = self._tile(j), Dft(shared.matrix.at[0])
        store(tile, self._twiddled(from_left(dft, tile), j))
        found = from_right(tile, dft)
        place = [shared.spectra.at[self.worker, part] for part in range(2)]
        plgpu.barrier_wait(shared.spectrum_came.at[self.worker])
        store(tile, times(found, place, conjugated=self.call.adjoint, dtype=dtype))
        if self.call.kept:
            store(place, found)
            for part in range(2):
                plgpu.copy_smem_to_gmem(place[part], self.found[-2].at[self._row(step), 2 * j + part])
        else:
            self._next_spectrum(i, step)
        store(tile, self._twiddled(from_right(tile, dft.conjugate()), j, conjugated=True))
        if self.call.kept:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._next_spectrum(i, step)
        back = from_left(dft.conjugate(), tile)
        store(tile, product(back, self._turns(j), conjugated=True, dtype=dtype))

    def _next_spectrum(self, i: Array, step: Array) -> None:
        last = (i == self.own - 1) & (step == self.call.rows - 1)
        pl.when(~last)(lambda: self.load_spectrum(lax.rem(i + 1, self.own)))

    def _twiddled(self, z: Complex, j: Array, *, conjugated: bool = False) -> Complex:
        columns = [by_column(part) for part in parts_of(self.shared.shifts, j)]
        options: Any = {"conjugated": conjugated, "dtype": self.call.dtype}
        return product(times(z, parts_of(self.shared.twiddles), **options), columns, **options)

    def _restored(self) -> tuple[Array, ...]:
        """Return y of own tiles."""

        dtype = self.call.dtype

        def add(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            real, imaginary = (read(part).astype(dtype) for part in self._tile(j))
            roots = [self._root(j, self._index(i)) for i in range(self.own)]
            return tuple(y + real * a + imaginary * b for y, (a, b) in zip(sums, roots, strict=True))

        return lax.fori_loop(
            0, self.call.ring.classes, add, tuple(zeros().astype(dtype) for _ in range(self.own))
        )

    def _leave(self, sums: tuple[Array, ...], inverse: Array, step: Array) -> None:
        """Store the convolution times each gate, and load the next row's inputs."""
        call, shared, tiles = self.call, self.shared, self.shared.tiles[0]
        for part in range(call.gates):
            for i in range(self.own):
                self._load(self.streams[call.inputs + part], step, i, part, shared.post_came)
        if call.gates:
            plgpu.barrier_wait(shared.post_came.at[self.worker])
        for i, total in enumerate(sums):
            convolved = total.astype(jnp.float32) * inverse
            for k in range(call.results):
                gate, place = (tiles.at[self._index(i), part] for part in (k, call.free + k))
                out = convolved * read(gate).astype(jnp.float32) if call.gates else convolved
                place[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for k in range(call.results):
            for i in range(self.own):
                place = tiles.at[self._index(i), call.free + k]
                plgpu.copy_smem_to_gmem(place, self._box(self.found[k], step, i))
        self._load_next(step, range(min(call.free, call.inputs)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self._load_next(step, range(call.free, call.inputs))

    def _load_next(self, step: Array, parts: Sequence[int]) -> None:
        if parts:
            pl.when(step + 1 < self.call.rows)(lambda: self.load(step + 1, parts))
