"""The Hopper kernel of rows of up to 32,768 steps: two warpgroups share a row, whose C tiles fill shared memory.

As in `mosaic_gpu_pass`, a row of C tiles is C transforms of 64 x 64 complex points. Here all lie in shared memory at
once, class j where tile j came in, and the spectrum of a class comes from device memory for each row. Tiles and
classes are dealt to warpgroups in turn. Between these steps each warpgroup waits for the other:

    u_m of own tiles, and their largest number      U_j of own classes, from all u
    own classes there and back, in place            y_m of own tiles, from all V_j
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

from pallas_kernels._conv.tiles import read, tile_ref, zeros
from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program
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


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      tiles: [C, 2]: x and pre_gate, u, a class's real and imaginary part, post_gate, y.
      spectra: of each warpgroup's class.
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
) -> Float[Array, "R N 64"]:
    """See `mosaic_gpu_pass.convolve`; an even number of classes, the last two not empty."""
    channels, streams = spectrum.shape[0], [z for z in (x, pre_gate, post_gate) if z is not None]
    batch = x.shape[0] // channels
    rows = rows_per_program(batch, channels)
    constants = [jnp.asarray(table) for table in tables_of_long_rows(ring)]
    return launch(
        partial(_program, ring=ring, rows=rows, pre=pre_gate is not None, post=post_gate is not None),
        (*streams, *constants, spectrum, inverse),
        jax.typeof(x),
        _scratch(ring, constants, 1 if pre_gate is None else 2),
        grid=(channels, batch // rows),
        workers=WORKERS,
        name=str(ring.points),
        interpret=interpret,
    )


def _scratch(ring: Ring, constants: Sequence[Array], inputs: int) -> Shared:
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
        came=plgpu.Barrier(num_arrivals=inputs * own, num_barriers=WORKERS),
        post_came=plgpu.Barrier(num_arrivals=own, num_barriers=WORKERS),
        spectrum_came=plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS),
        met=plgpu.Barrier(num_arrivals=WORKERS),
    )


def _program(*refs: Any, ring: Ring, rows: int, pre: bool, post: bool) -> None:
    """One channel of `rows` rows."""
    count = 1 + pre + post
    streams, (matrix, twiddles, shifts, turns, roots, spectrum, inverse, y, shared) = (
        refs[:count],
        refs[count:],
    )
    channel, worker = lax.axis_index("channel"), lax.axis_index("warpgroup")

    @pl.when(worker == 0)
    def _() -> None:
        whole = ((shifts, shared.shifts), (turns, shared.turns), (roots, shared.roots))
        tiles = [(matrix.at[0], shared.matrix.at[0])]
        tiles += [(twiddles.at[i], shared.twiddles.at[i]) for i in range(2)]
        for source, place in (*whole, *tiles, (inverse.at[channel], shared.inverse)):
            plgpu.copy_gmem_to_smem(source, place, shared.ready)

    row = _Row(ring, pre, streams, spectrum.at[channel], y, shared, worker, rows, spectrum.shape[0])
    row.load_spectrum(worker * 0)
    row.load_x(worker * 0)
    row.load_pre(worker * 0)
    plgpu.barrier_wait(shared.ready)
    lax.fori_loop(0, rows, lambda step, _: row.convolve(step, post), None)
    plgpu.wait_smem_to_gmem(0)


class _Row(NamedTuple):
    """What one of two warpgroups does of a row."""

    ring: Ring
    pre: bool
    streams: Sequence[Any]
    spectrum: Any
    y: Any
    shared: Shared
    worker: Array
    rows: int
    channels: int

    @property
    def own(self) -> int:
        """Tiles, and classes, of a warpgroup."""
        return self.ring.classes // WORKERS

    def load_x(self, step: Array) -> None:
        for i in range(self.own):
            self._load(self.streams[0], step, i, 0, self.shared.came)

    def load_pre(self, step: Array) -> None:
        for i in range(self.own if self.pre else 0):
            self._load(self.streams[1], step, i, 1, self.shared.came)

    def _load(self, stream: Any, step: Array, i: int, part: int, barrier: Any) -> None:
        place = self.shared.tiles[0].at[self._index(i), part]
        plgpu.copy_gmem_to_smem(self._box(stream, step, i), place, barrier.at[self.worker])

    def load_spectrum(self, i: Array) -> None:
        """H of the i-th own class."""
        for part in range(2):
            place = self.shared.spectra.at[self.worker, part]
            source = self.spectrum.at[2 * self._index(i) + part]
            plgpu.copy_gmem_to_smem(source, place, self.shared.spectrum_came.at[self.worker])

    def convolve(self, step: Array, post: bool) -> None:
        """One row, and the loads of the next."""
        inverse = self._enter()
        self._turn()
        lax.fori_loop(0, self.own, lambda i, _: self._class(i, step), None)
        self._meet()
        sums = self._restored()
        self._meet()
        self._leave(sums, spread(inverse * by_row(self.shared.inverse)), step, post)

    def _index(self, i: Any) -> Array:
        """Of the i-th own tile or class."""
        return self.worker + WORKERS * i

    def _box(self, array: Any, step: Array, i: int) -> Any:
        row = lax.axis_index("rows") * self.rows + step
        return array.at[row * self.channels + lax.axis_index("channel"), pl.ds(self._index(i) * ROWS, ROWS)]

    def _meet(self) -> None:
        """Both warpgroups have come here, and see what the other has written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.met)
        plgpu.barrier_wait(self.shared.met)

    def _tile(self, j: Any) -> list[Any]:
        return [self.shared.tiles[1].at[j, part] for part in range(2)]

    def _enter(self) -> Float[Array, "64"]:
        """u of own tiles, scaled; one over the scale, which is the same in all rows of a tile."""
        shared = self.shared
        plgpu.barrier_wait(shared.came.at[self.worker])
        found, largest = [], None
        for i in range(self.own):
            parts = [shared.tiles[0].at[self._index(i), part] for part in range(1 + self.pre)]
            x, *gates = (read(part).astype(jnp.float32) for part in parts)
            found.append(x * gates[0] if gates else x)
            size = jnp.abs(found[-1])
            largest = size if largest is None else jnp.maximum(largest, size)
        assert largest is not None
        sizes = shared.sizes.at[self.worker]
        sizes[...] = jnp.max(largest, axis=1)
        self._meet()
        both = jnp.maximum(by_column(shared.sizes.at[0]), by_column(shared.sizes.at[1]))
        scale, inverse = scales(jnp.max(both, axis=1), self.ring.points)
        for i, u in enumerate(found):
            place = self._tile(self._index(i))[0]
            place[...] = (u * spread(scale)).astype(jnp.float16)
        self._meet()
        return inverse

    def _turn(self) -> None:
        """U of own classes, once all u are read."""
        u = [read(self._tile(m)[0]) for m in range(self.ring.classes)]
        self._meet()

        def turned(i: Array, _: None) -> None:
            j = self._index(i)
            total: list[Any] = [zeros(), zeros()]
            for m, z in enumerate(u):
                wide = z.astype(jnp.float32)
                total = [sum_ + wide * root for sum_, root in zip(total, self._root(j, m), strict=True)]
            store(self._tile(j), product((total[0], total[1]), self._turns(j)))

        lax.fori_loop(0, self.own, turned, None)

    def _root(self, j: Any, m: Any) -> list[Array]:
        at = 2 * (j * self.ring.classes + m)
        return [self.shared.roots[at + part] for part in range(2)]

    def _turns(self, j: Array) -> list[Array]:
        return [spread(by_row(part)) for part in parts_of(self.shared.turns, j)]

    def _class(self, i: Array, step: Array) -> None:
        """V of the i-th own class, turned back, in place of U."""
        shared, j = self.shared, self._index(i)
        tile, dft = self._tile(j), Dft(shared.matrix.at[0])
        store(tile, self._twiddled(from_left(dft, tile), j))
        found = from_right(tile, dft)
        plgpu.barrier_wait(shared.spectrum_came.at[self.worker])
        store(tile, times(found, [shared.spectra.at[self.worker, part] for part in range(2)]))
        last = (i == self.own - 1) & (step == self.rows - 1)
        pl.when(~last)(lambda: self.load_spectrum(lax.rem(i + 1, self.own)))
        store(tile, self._twiddled(from_right(tile, dft.conjugate()), j, conjugated=True))
        store(tile, product(from_left(dft.conjugate(), tile), self._turns(j), conjugated=True))

    def _twiddled(self, z: Complex, j: Array, *, conjugated: bool = False) -> Complex:
        columns = [by_column(part) for part in parts_of(self.shared.shifts, j)]
        turned = times(z, parts_of(self.shared.twiddles), conjugated=conjugated)
        return product(turned, columns, conjugated=conjugated)

    def _restored(self) -> tuple[Array, ...]:
        """y of own tiles."""

        def add(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            real, imaginary = (read(part).astype(jnp.float32) for part in self._tile(j))
            roots = [self._root(j, self._index(i)) for i in range(self.own)]
            return tuple(y + real * a + imaginary * b for y, (a, b) in zip(sums, roots, strict=True))

        return lax.fori_loop(0, self.ring.classes, add, tuple(zeros() for _ in range(self.own)))

    def _leave(self, sums: tuple[Array, ...], inverse: Array, step: Array, post: bool) -> None:
        """post_gate y to device memory, and the next row's inputs from there."""
        shared, tiles = self.shared, self.shared.tiles[0]
        for i in range(self.own if post else 0):
            self._load(self.streams[-1], step, i, 0, shared.post_came)
        if post:
            plgpu.barrier_wait(shared.post_came.at[self.worker])
        for i, total in enumerate(sums):
            out, (gate, place) = total * inverse, (tiles.at[self._index(i), part] for part in range(2))
            out = out * read(gate).astype(jnp.float32) if post else out
            place[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for i in range(self.own):
            plgpu.copy_smem_to_gmem(tiles.at[self._index(i), 1], self._box(self.y, step, i))
        more = step + 1 < self.rows
        pl.when(more)(lambda: self.load_x(step + 1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if self.pre:
            pl.when(more)(lambda: self.load_pre(step + 1))
