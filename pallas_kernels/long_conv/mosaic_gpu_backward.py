"""The Hopper kernel of gradients: rows of up to 8,192 steps, all gradients in one pass over memory.

A program takes one channel and walks over its rows. With u = pre_gate x, v = post_gate dy, their spectra U and V, and
the taps' H, as in `mosaic_gpu_pass`,

    y = Re(A^H (H U)),    dpost_gate = dy y,    du = Re(A^H (conj(H) V)),    dx = pre_gate du,    dpre_gate = x du,

and conj(U) V is summed over the rows in fp32 and registers, from which XLA makes the taps' gradient. Programs that
share a channel write sums of their own, so the result is the same from run to run.

Each class of frequencies has a warpgroup of its own. A row of two tiles is therefore shared by two, a team. Each makes
the share of its class in both tiles of y and du, and hands that of the other tile over in fp16. v is transformed first,
as the next row's dy and post_gate come before its x and pre_gate, from whose places dx and dpre_gate leave last.

Rows whose length is no multiple of 512 may stay where they are (`mosaic_gpu_flat`). u and v then begin at the same
point of their rings, so what the taps' gradient is made of does not change.
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
from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program, varying_like
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.hopper import PAIR, Ring
from pallas_kernels.long_conv.mosaic_gpu_flat import Flat, FlatTile, count_boxes
from pallas_kernels.long_conv.mosaic_gpu_launch import launch, load_constants
from pallas_kernels.long_conv.mosaic_gpu_products import (
    Complex,
    Dft,
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

X, DY, PRE, POST = range(4)
"""Streams; the gradient of x, or of a gate, leaves from where that came."""

Streams = dict[int, Sequence[Any]]
"""One array each, or as many as `Flat.arrays`."""


class Call(NamedTuple):
    """The static part of a program.

    Attributes:
      rows: of a program.
      places: the streams that there are.
      dtype: of products element by element, except those that are summed over rows.
      flat: rows that lie one behind another, None for a matrix each.
    """

    ring: Ring
    channels: int
    rows: int
    teams: int
    places: tuple[int, ...]
    dtype: Any
    flat: Flat | None = None

    @property
    def tiles(self) -> int:
        """The unit that teams take in turn: a row of C tiles, or a tile of several rows."""
        return self.rows // self.ring.together

    @property
    def boxes(self) -> int:
        """Copies of one stream a turn."""
        return count_boxes(self.ring, self.flat)

    @property
    def inner(self) -> list[int]:
        """Streams that u is made of."""
        return [place for place in (X, PRE) if place in self.places]

    @property
    def outer(self) -> list[int]:
        """Streams that v is made of."""
        return [place for place in (DY, POST) if place in self.places]

    @property
    def workers(self) -> int:
        return self.teams * self.ring.classes


class Shared(NamedTuple):
    """Shared memory.

    Attributes:
      streams: [team, stream, C].
      sent: [warpgroup, 2]: U, then H U, then its shares of y.
      got: the same of V and du.
      came: says that x and its gate are there; `got_came` says it of dy and its gate.
    """

    streams: Any
    sent: Any
    got: Any
    sizes: Any
    matrices: Any
    twiddles: Any
    turns: Any
    spectrum: Any
    inverse: Any
    ready: Any
    came: Any
    got_came: Any
    met: Any


class Gradients(NamedTuple):
    """Gradients by stream; conj(U) V [D, N, 2 C, 64, 64] and sums of u v [D, N], in N parts."""

    streams: dict[int, Float[Array, "R N 64"] | Float[Array, "B D T"]]
    spectrum: Float[Array, "D N P 64 64"]
    bias: Float[Array, "D N"]


def differentiate(
    ring: Ring,
    spectrum: Float[Array, "D P 64 64"],
    inverse: Float[Array, "D 64"],
    streams: dict[int, Float[Array, "R N 64"] | Float[Array, "B D T"]],
    *,
    interpret: bool,
    dtype: Any = jnp.float32,
    flat: Flat | None = None,
) -> Gradients:
    """Return gradients of streams in chunks.

    `mosaic_gpu_tables.spectrum` explains the two arguments before them. `flat` rows are not in chunks, and neither are
    their gradients.
    """
    channels, x = spectrum.shape[0], streams[X]
    batch = (x.shape[0] if flat is None else flat.rows) // channels
    rows = rows_per_program(batch // ring.together, channels) * ring.together
    teams = min(PAIR // ring.classes, rows // ring.together)
    call = Call(ring, channels, rows, teams, tuple(sorted(streams)), dtype, flat)
    constants = [jnp.asarray(table) for table in tables(ring) if table is not None]
    parts, wanted = batch // rows * teams, [place for place in call.places if place != DY]
    given = [[streams[place]] if flat is None else flat.enter(streams[place]) for place in call.places]
    *found, sums, bias = launch(
        partial(_program, call=call),
        (*(z for stream in given for z in stream), *constants, spectrum, inverse),
        (
            *(jax.typeof(z) for _ in wanted for z in given[0]),
            varying_like(x, (channels * parts, 2 * ring.classes, ROWS, CHUNK), jnp.float32),
            varying_like(x, (channels * parts, ring.classes, ROWS), jnp.float32),
        ),
        _scratch(call, constants),
        grid=(channels, batch // rows),
        workers=call.workers,
        name=f"{ring.points}_vjp" if flat is None else f"{ring.points}_flat_vjp",
        interpret=interpret,
    )
    if flat is not None:
        found = [flat.leave(arrays, x.shape) for arrays in _groups(found, flat.arrays)]
    return Gradients(
        dict(zip(wanted, found, strict=True)),
        sums.reshape(channels, parts, *sums.shape[1:]),
        bias.reshape(channels, -1),
    )


def _groups(arrays: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Split arrays into groups of `size`."""
    return [arrays[i : i + size] for i in range(0, len(arrays), size)]


def _scratch(call: Call, constants: Sequence[Array]) -> Shared:
    matrices, twiddles, turns = (z.shape for z in constants)
    count, classes, half = len(call.places), call.ring.classes, jnp.float16
    operands, boxes = (call.workers, 2, ROWS, CHUNK), call.boxes
    stream_ref = tile_ref if call.flat is None else chunks_ref
    return Shared(
        streams=stream_ref(call.teams, count, classes, ROWS, CHUNK, dtype=jnp.bfloat16),
        sent=tile_ref(*operands, dtype=half),
        got=tile_ref(*operands, dtype=half),
        sizes=plgpu.SMEM((call.workers, ROWS), jnp.float32),
        matrices=tile_ref(*matrices, dtype=half),
        twiddles=tile_ref(*twiddles, dtype=half),
        turns=plgpu.SMEM(turns, half),
        spectrum=tile_ref(2 * classes, ROWS, CHUNK, dtype=half),
        inverse=plgpu.SMEM((ROWS,), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=matrices[0] + twiddles[0] + 2 * classes + 2),
        came=plgpu.Barrier(num_arrivals=len(call.inner) * boxes, num_barriers=call.teams),
        got_came=plgpu.Barrier(num_arrivals=len(call.outer) * boxes, num_barriers=call.teams),
        met=plgpu.Barrier(num_arrivals=classes, num_barriers=call.teams),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one channel of `rows` rows."""
    each = 1 if call.flat is None else call.flat.arrays
    count = len(call.places) * each
    streams, (matrices, twiddles, turns, spectrum, inverse) = refs[:count], refs[count : count + 5]
    *found, sums_out, bias_out, shared = refs[count + 5 :]
    channel, worker = lax.axis_index("channel"), lax.axis_index("warpgroup")

    own = (spectrum.at[channel], shared.spectrum)
    vectors = [(turns, shared.turns), (inverse.at[channel], shared.inverse)]
    load_constants(
        worker, [(matrices, shared.matrices), (twiddles, shared.twiddles), own], vectors, shared.ready
    )
    wanted = [place for place in call.places if place != DY]
    row = _Row(
        call,
        dict(zip(call.places, _groups(streams, each), strict=True)),
        dict(zip(wanted, _groups(found, each), strict=True)),
        shared,
        worker // call.ring.classes,
        worker % call.ring.classes,
    )
    steps = (call.tiles - row.team + call.teams - 1) // call.teams
    row.load(worker * 0, call.outer)
    row.load(worker * 0, call.inner)
    plgpu.barrier_wait(shared.ready)
    start = (zeros(), zeros(), plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), plgpu.Layout.WGMMA.reduce(1)))
    *sums, bias = lax.fori_loop(0, steps, lambda step, sums: row.differentiate(step, steps, sums), start)
    plgpu.wait_smem_to_gmem(0)
    part = (channel * lax.axis_size("rows") + lax.axis_index("rows")) * call.teams + row.team
    for i, total in enumerate(sums):
        sums_out[part, 2 * row.own + i] = total
    bias_out[part, row.own] = bias


class _Row(NamedTuple):
    """The work of one warpgroup: its own class of its team's rows, and the tile of that number."""

    call: Call
    streams: Streams
    found: Streams
    shared: Shared
    team: Array
    own: Array

    @property
    def worker(self) -> Array:
        return self.team * self.call.ring.classes + self.own

    def load(self, step: Array, places: Sequence[int]) -> None:
        """Load the own tile of these streams."""
        for place in places:
            came = self.shared.got_came if place in self.call.outer else self.shared.came
            if self.call.flat is not None:
                self._load_flat(place, came.at[self.team], step)
                continue
            for box, part in self._boxes(self.streams[place][0], self._place(place, self.own), step):
                plgpu.copy_gmem_to_smem(box, part, came.at[self.team])

    def _load_flat(self, place: int, came: Any, step: Array) -> None:
        """Load the own tile of a stream, whose pieces its number says."""
        load = self._flat(step).load
        for m in range(self.call.ring.classes):
            source, tile = self.streams[place], self._place(place, m)
            pl.when(self.own == m)(partial(load, source, tile, m, came))

    def differentiate(self, step: Array, steps: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Take one turn: return its sums with those before, and load the next turn."""
        shared, dtype = self.shared, self.call.dtype
        sent, got = ([ref.at[self.worker, i] for i in range(2)] for ref in (shared.sent, shared.got))
        plgpu.barrier_wait(shared.got_came.at[self.team])
        scale, inverse_got = self._scales(DY, POST)
        store(got, self._turned(DY, POST, scale, step))
        store(got, self._transformed(got))
        plgpu.barrier_wait(shared.came.at[self.team])
        bias = sums[2] + jnp.sum(self._input(X, PRE, self.own) * self._input(DY, POST, self.own), axis=1)
        scale, inverse = self._scales(X, PRE)
        store(sent, self._turned(X, PRE, scale, step))
        u = self._transformed(sent)
        shares, both = product(_read(got), u, conjugated=True), spread(inverse * inverse_got)
        sums = tuple(total + z * both for total, z in zip(sums, shares, strict=False))
        if POST in self.call.places:
            store(sent, times(u, self._spectrum(), dtype=dtype))
            self._restore(sent, step)
        store(got, times(_read(got), self._spectrum(), conjugated=True, dtype=dtype))
        self._restore(got, step)
        self._meet()
        more, scale_back = step + 1 < steps, by_row(shared.inverse)
        # Keep this before the loads that let the other warpgroup overwrite its shares.
        du = self._restored(shared.got) * spread(inverse_got * scale_back)
        if POST in self.call.places:
            y = self._restored(shared.sent) * spread(inverse * scale_back)
            self._write(POST, y * self._tile(DY))
            plgpu.commit_smem()
            self._send([POST], step)
        x = self._tile(X)
        self._write(X, du * self._tile(PRE) if PRE in self.call.places else du)
        if PRE in self.call.places:
            self._write(PRE, du * x)
        plgpu.commit_smem()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(more)(lambda: self.load(step + 1, self.call.outer))
        self._send(self.call.inner, step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(more)(lambda: self.load(step + 1, self.call.inner))
        return *sums, bias

    def _boxes(self, array: Any, tile: Any, step: Array) -> list[tuple[Any, Any]]:
        """Return where the own tile's chunks lie in device memory, and their places in `tile`."""
        ring, found, first = self.call.ring, [], self._first(step)
        for i in range(ring.together):
            row = (first + i) * self.call.channels + lax.axis_index("channel")
            # Keep the start unknown to Pallas, which refuses a box that reaches past the row's end.
            chunks = pl.ds((step * 0 + self.own) * ROWS, ring.height)
            part = tile if ring.together == 1 else tile.at[pl.ds(i * ring.height, ring.height)]
            found.append((array.at[row, chunks], part))
        return found

    def _first(self, step: Array) -> Array:
        """Return the first of the channel's rows that a turn takes."""
        first = lax.axis_index("rows") * self.call.rows
        return first + (self.team + step * self.call.teams) * self.call.ring.together

    def _flat(self, step: Array) -> FlatTile:
        assert self.call.flat is not None
        return FlatTile(self.call.flat, self.call.channels, self._first(step))

    def _place(self, place: int, m: Any) -> Any:
        return self.shared.streams.at[self.team, self.call.places.index(place), m]

    def _tile(self, place: int) -> Array:
        """Return the own tile of a stream, in fp32."""
        return read(self._place(place, self.own)).astype(jnp.float32)

    def _input(self, place: int, gate: int, m: Any) -> Array:
        """Return a tile of a stream times its gate, in fp32."""
        z = read(self._place(place, m)).astype(jnp.float32)
        return z * read(self._place(gate, m)).astype(jnp.float32) if gate in self.call.places else z

    def _scales(self, place: int, gate: int) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
        ring = self.call.ring
        tiles = (self._input(place, gate, m) for m in range(ring.classes))
        return row_scales(tiles, self.shared.sizes.at[self.worker], ring)

    def _turned(self, place: int, gate: int, scale: Array, step: Array) -> Complex:
        """Return the own class of a row."""
        total: list[Any] = [0.0, 0.0]
        for m in range(self.call.ring.classes):
            z = self._input(place, gate, m)
            if self.call.flat is not None and m == 0:
                total = [*self._flat(step).turned(z, [turn * scale for turn in self._turn(m)])]
                continue
            total = [sum_ + z * spread(t * scale) for sum_, t in zip(total, self._turn(m), strict=True)]
        return total[0], total[1]

    def _turn(self, m: Any) -> list[Float[Array, "64"]]:
        at = 2 * (self.own * self.call.ring.classes + m)
        return [by_row(self.shared.turns.at[at + part]).astype(jnp.float32) for part in range(2)]

    def _spectrum(self) -> list[Any]:
        return parts_of(self.shared.spectrum, self.own)

    def _dfts(self) -> tuple[Dft, Dft]:
        matrices = self.shared.matrices
        return Dft(matrices.at[0]), Dft(matrices.at[matrices.shape[0] - 1])

    def _transformed(self, tile: Sequence[Any]) -> Complex:
        first, last = self._dfts()
        twiddles = parts_of(self.shared.twiddles, self.own)
        store(tile, times(from_left(first, tile), twiddles, dtype=self.call.dtype))
        return from_right(tile, last)

    def _restore(self, tile: Sequence[Any], step: Array) -> None:
        """Put the own class's shares of the own tile and of the other in place of its spectrum.

        This takes fewer registers.
        """
        first, last = (dft.conjugate() for dft in self._dfts())
        back = from_right(tile, last)
        twiddles = parts_of(self.shared.twiddles, self.own)
        store(tile, times(back, twiddles, conjugated=True, dtype=self.call.dtype))
        back = from_left(first, tile)
        for ref, m in zip(tile, (self.own, 1 - self.own)[: self.call.ring.classes], strict=False):
            real, imaginary = (spread(turn) for turn in self._turn(m))
            share = back if self.call.flat is None else self._flat(step).turned_back(back, m)
            ref[...] = (share[0] * real + share[1] * imaginary).astype(jnp.float16)

    def _meet(self) -> None:
        """Wait until the team's warpgroups have come here, and see what the other has written."""
        if self.call.ring.classes > 1:
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.shared.met.at[self.team])
            plgpu.barrier_wait(self.shared.met.at[self.team])

    def _restored(self, shares: Any) -> Array:
        """Return the own tile, from all classes' shares."""
        classes = self.call.ring.classes
        found = read(shares.at[self.worker, 0]).astype(jnp.float32)
        if classes == 1:
            return found
        return found + read(shares.at[self.team * classes + 1 - self.own, 1]).astype(jnp.float32)

    def _write(self, place: int, z: Array) -> None:
        """Write a gradient's own tile, where its stream was."""
        self._place(place, self.own)[...] = z.astype(jnp.bfloat16)

    def _send(self, places: Sequence[int], step: Array) -> None:
        """Send gradients to device memory."""
        for place in places:
            if self.call.flat is not None:
                self._send_flat(place, step)
                continue
            for box, part in self._boxes(self.found[place][0], self._place(place, self.own), step):
                plgpu.copy_smem_to_gmem(part, box)

    def _send_flat(self, place: int, step: Array) -> None:
        store = self._flat(step).store
        for m in range(self.call.ring.classes):
            pl.when(self.own == m)(partial(store, self.found[place], self._place(place, m), m))


def _read(tile: Sequence[Any]) -> Complex:
    real, imaginary = (read(part).astype(jnp.float32) for part in tile)
    return real, imaginary
