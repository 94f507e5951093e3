"""Rows of any length where they lie, for kernels that keep a row on chip: no stream is copied to be padded.

Rows lie one behind another in chunks of 64 steps (`_conv.flat_rows`). Row r of T steps begins s steps into a chunk. A
kernel loads whole chunks, so the row begins at point s of its ring of M points:

    ring      0    s                                   T + s       M
              [....|row............................|....]             T + s <= M
              [end.|row..................................]            T + s > M: the last T + s - M steps wrap around

A convolution of a row that begins later begins later, so tables and the taps' spectrum stay as they are. Steps behind
the ring's end belong to points in front of the row: z^M = i in the ring (`dft`), so these are multiplied by i on their
way in, and come out as imaginary parts. There are at most s of them, all in the first chunk.

Chunks that a row shares with its neighbours, its edges, are cut out of each stream in XLA, zero where they are not the
row's. The kernel puts them where the stream's chunks would be, and writes those of a result apart: XLA joins them.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.flat_rows import FlatRows, flatten, unflatten
from pallas_kernels._hopper import CHUNK, ROWS
from pallas_kernels.long_conv.hopper import TILE, Ring
from pallas_kernels.long_conv.mosaic_gpu_products import Complex, spread


class Flat(NamedTuple):
    """`rows` rows of `length` steps in all, at least a chunk each, no longer than their ring."""

    ring: Ring
    length: int
    rows: int

    @property
    def ragged(self) -> bool:
        """True if any row begins within a chunk."""
        return self.length % CHUNK != 0

    @property
    def wraps(self) -> bool:
        """True if any row ends behind its ring."""
        return self.length + CHUNK - math.gcd(self.length, CHUNK) > self.ring.points

    @property
    def whole(self) -> int:
        """Chunks of a row's ring that the row reaches the end of, wherever it begins."""
        return self.length // CHUNK

    @property
    def edges(self) -> list[int]:
        """Chunks of a ring that may hold a neighbour's steps: the first, and the last two in which a row may end."""
        chunks = (0, self.whole, self.whole + 1) if self.ragged else ()
        return [chunk for chunk in chunks if chunk * CHUNK < self.ring.points]

    @property
    def arrays(self) -> int:
        """Arrays that a stream is, or a result."""
        return 1 + self.ragged

    def copies(self, m: int) -> int:
        """Count copies of a stream that `FlatTile.load` makes of tile m."""
        return self.ring.together * len(self.pieces(m))

    def pieces(self, m: int) -> list[tuple[int, int, int | None]]:
        """Return what is copied of a row's tile m: first chunk, how many, and the edge's number.

        An edge's number stands without the others.
        """
        height = self.ring.height
        at = {chunk - m * ROWS: i for i, chunk in enumerate(self.edges) if 0 <= chunk - m * ROWS < height}
        bounds = {0, height, *at, *(chunk + 1 for chunk in at), min(max(self.whole - m * ROWS, 0), height)}
        return [(start, stop - start, at.get(start)) for start, stop in pairwise(sorted(bounds))]

    def cut(self, row: Any) -> tuple[Any, Any]:
        """Return the chunk that a row begins in, and s."""
        return FlatRows(self.length).cut(row)

    def enter(self, z: Float[Array, "B D T"]) -> list[Array]:
        """Cut a stream into chunks [N, 64], and edges of its rows [rows E, 64] if they have any."""
        chunks = flatten(z)
        if not self.ragged:
            return [chunks]
        first, start = (n[:, None] for n in self.cut(jnp.arange(self.rows, dtype=jnp.int32)))
        step, end = jnp.arange(CHUNK, dtype=jnp.int32)[None], start + self.length

        def own(chunk: int) -> Array:
            """Return a chunk of each ring, counted on behind its end, zero where it is not the row's."""
            point, at = chunk * CHUNK + step, first[:, 0] + chunk
            found = chunks.at[at].get(mode="clip", indices_are_sorted=True)
            return jnp.where((point >= start) & (point < end), found, jnp.zeros((), z.dtype))

        edges = [own(chunk) for chunk in self.edges]
        if self.wraps:
            edges[0] += own(self.ring.points // CHUNK)
        return [chunks, jnp.stack(edges, axis=1).reshape(-1, CHUNK)]

    def leave(self, found: Sequence[Array], shape: tuple[int, ...]) -> Float[Array, "B D T"]:
        """Join a result from its chunks, and the edges of its rows if they have any."""
        y, *edges = found
        if not edges:
            return unflatten(y, shape)
        chunk, start = self.cut(jnp.arange(self.rows + 1, dtype=jnp.int32))
        parts, end = edges[0].reshape(self.rows, -1, CHUNK), start[:-1] + self.length
        # End a row in the last of its edges that it reaches, or around the ring in the first.
        last = parts[:, 0]
        for i, place in enumerate(self.edges[1:], 1):
            here = (end > place * CHUNK) & (end <= self.ring.points)
            last = jnp.where(here[:, None], parts[:, i], last)
        # Repeat the first and the last: no row lies before the first, or behind the last.
        before, behind = jnp.concatenate([last[:1], last]), jnp.concatenate([parts[:, 0], parts[-1:, 0]])
        shared = jnp.where(jnp.arange(CHUNK)[None] < start[:, None], before, behind)
        options: Any = {"mode": "drop", "unique_indices": True, "indices_are_sorted": True}
        return unflatten(y.at[chunk].set(shared, **options), shape)


def count_boxes(ring: Ring, flat: Flat | None) -> int:
    """Return how many copies move one stream of a row of tiles."""
    return ring.classes * ring.together if flat is None else sum(flat.copies(m) for m in range(ring.classes))


class FlatTile(NamedTuple):
    """The rows of one channel that a kernel holds at a time, from `first` on: one, or as many as share a tile."""

    flat: Flat
    channels: int
    first: Array

    def load(self, source: Sequence[Any], tile: Any, m: int, barrier: Any) -> None:
        """Load tile m of a stream, which `source` has as `Flat.enter` gives it."""
        chunks, *edges = source
        for i in range(self.flat.ring.together):
            row = self._row(i)
            for first, count, edge in self.flat.pieces(m):
                if edge is not None:
                    box = edges[0].at[pl.ds(row * len(self.flat.edges) + edge, count)]
                elif m * ROWS + first >= self.flat.whole:  # Behind all rows the copy engine reads zeros.
                    box = chunks.at[pl.ds(row * 0 + chunks.shape[0], count)]
                else:
                    box = chunks.at[pl.ds(self.flat.cut(row)[0] + m * ROWS + first, count)]
                part = tile.at[pl.ds(i * self.flat.ring.height + first, count)]
                plgpu.copy_gmem_to_smem(box, part, barrier)

    def store(self, target: Sequence[Any], tile: Any, m: int) -> None:
        """Store tile m of a result, to be put together by `Flat.leave`."""
        chunks, *edges = target
        for i in range(self.flat.ring.together):
            row = self._row(i)
            for first, count, edge in self.flat.pieces(m):
                part = tile.at[pl.ds(i * self.flat.ring.height + first, count)]
                start, at = self.flat.cut(row)[0] + m * ROWS + first, m * ROWS + first
                if edge is not None:
                    box = edges[0].at[pl.ds(row * len(self.flat.edges) + edge, count)]
                    plgpu.copy_smem_to_gmem(part, box)
                    if at == self.flat.whole:  # No edge of a row that reaches its end.
                        full = self.flat.cut(row)[1] + self.flat.length % CHUNK >= CHUNK
                        pl.when(full)(partial(plgpu.copy_smem_to_gmem, part, chunks.at[pl.ds(start, count)]))
                elif at < self.flat.whole:
                    plgpu.copy_smem_to_gmem(part, chunks.at[pl.ds(start, count)])

    def turned(self, u: Array, turn: Sequence[Array]) -> Complex:
        """Return the ring's first tile times its turns.

        Where steps wrapped around it is also times i. Those are in the first chunk, whose turn is real.
        """
        real, imaginary = (spread(part) for part in turn)
        if not self.flat.wraps:
            return u * real, u * imaginary
        wrapped = jnp.where(self._is_wrapped(0), u, jnp.zeros_like(u))
        return (u - wrapped) * real, u * imaginary + wrapped * real

    def turned_back(self, z: Complex, m: int | Array) -> Complex:
        """Return tile m, ready for its turns, whose real part is taken.

        Where steps wrapped around it is over i.
        """
        real, imaginary = z
        if not self.flat.wraps or (isinstance(m, int) and m > 0):
            return z
        return jnp.where(self._is_wrapped(m), imaginary, real), imaginary

    def _row(self, i: Any) -> Any:
        return (self.first + i) * self.channels + lax.axis_index("channel")

    def _is_wrapped(self, m: int | Array) -> Array:
        """Mark elements of the ring's tile m that hold steps from behind its end."""
        ring = self.flat.ring
        chunk, step = (
            plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        row = self._row(0 if ring.together == 1 else chunk >> (ring.height.bit_length() - 1))
        start = (row * (self.flat.length % CHUNK)) & (CHUNK - 1)
        # Compare steps, which two chunks of a thread share, in place of points.
        before = CHUNK * (chunk & (ring.height - 1)) + TILE * m
        return step < start + (self.flat.length - ring.points) - before
