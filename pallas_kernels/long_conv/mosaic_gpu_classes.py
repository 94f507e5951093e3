"""The Hopper kernel of classes: of rows that do not fit on chip, each class of frequencies by itself.

`mosaic_gpu_outer` takes rows apart into C tiles G_j of 64 x 64 complex numbers, n' = 64 a + b. Of each

    Z = twiddle_j * (K_j G_j)      S = Z F      K_j[k_1, a] = F[k_1, a] w^(64 a (4j - 1))
    W = twiddle_j^* * (P F^*)      V = K_j^H W

where P = H_j * S is the tile times the taps' own, which went the same way. A program takes one class and some channels.
It loads that class's tables once and makes the taps' spectrum of each channel once, for all of its rows: no spectrum is
ever in device memory. Each warpgroup has channels of its own and waits for no other. The taps of its next channel
arrive while the last row is turned back, and its next row in another place.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.dft import turned
from pallas_kernels.long_conv.hopper import TILE
from pallas_kernels.long_conv.monarch_vjp import LARGEST_NORM
from pallas_kernels.long_conv.mosaic_gpu_launch import launch
from pallas_kernels.long_conv.mosaic_gpu_products import (
    Complex,
    Dft,
    from_left,
    from_right,
    parts_of,
    store,
    times,
)
from pallas_kernels.long_conv.mosaic_gpu_tables import dft_parts

WORKERS = 2
"""Warpgroups whose sums fit into registers; a third one fits into shared memory and spills."""

PLACES = 2
"""Rows of a warpgroup in shared memory: one is loaded while the other is convolved."""

COPIES = 4
"""The copies that a program loads once: two matrices, two parts of the twiddles."""


class Tables(NamedTuple):
    """Attributes:
    matrix: -Im F, Re F and Im F over 8 side by side, [1, 64, 192].
    firsts: the same of K_j, [C, 64, 192].
    twiddles: exp(-2 pi i b (4 (j + C k_1) - 1) / 4M), real and imaginary parts, [2 C, 64, 64].
    """

    matrix: Any
    firsts: Any
    twiddles: Any


def tables(classes: int) -> Tables:
    """Return tables of rows of so many classes, in fp16, from phases that are whole numbers."""
    j, k = (jnp.arange(n, dtype=jnp.uint32) for n in (classes, ROWS))
    frequency = 4 * (j[:, None, None] + classes * k[None, :, None])

    def phases(whole: int) -> tuple[Array, Array]:
        return turned((frequency + (whole - 1)) % whole, CHUNK, whole, jnp.float16)

    (cosine, sine), (real, imaginary) = phases(4 * classes * ROWS), phases(4 * classes * TILE)
    twiddles = jnp.stack([real, -imaginary], axis=1) * jnp.float16(CHUNK**0.5)
    return Tables(
        jnp.asarray(dft_parts(CHUNK)[None].astype(np.float16)),
        jnp.concatenate([sine, cosine, -sine], axis=2),
        twiddles.reshape(-1, ROWS, CHUNK),
    )


class Call(NamedTuple):
    """The static part of a program; `own` are its channels, `dtype` is of products element by element."""

    classes: int
    batch: int
    channels: int
    own: int
    workers: int
    dtype: Any

    def channel(self, worker: Array, i: Array) -> Array:
        """Return a warpgroup's i-th channel."""
        return lax.axis_index("channels") * self.own + worker + i * self.workers

    def row(self, part: int, row: Array, channel: Array) -> Array:
        """Return the index of a tile of the program's class among [2 C, B, D]."""
        return ((2 * lax.axis_index("class") + part) * self.batch + row) * self.channels + channel

    def taps(self, part: int, channel: Array) -> Array:
        """Return the index of a tile of the program's class among [2 C, D]."""
        return (2 * lax.axis_index("class") + part) * self.channels + channel


class Shared(NamedTuple):
    """Shared memory; `taps` holds G, then H."""

    rows: Any
    taps: Any
    matrices: Any
    twiddles: Any
    ready: Any
    taps_came: Any
    rows_came: Any


def convolve_classes(
    taps: Float[Array, "P D 64 64"],
    rows: Float[Array, "P B D 64 64"],
    *,
    interpret: bool,
    dtype: Any = jnp.float32,
) -> Float[Array, "P B D 64 64"]:
    """Return V of each class, row and channel, from G of rows and of taps.

    Real and imaginary part of a class stand in turn.
    """
    parts, batch, channels = rows.shape[:3]
    classes = parts // 2
    own = rows_per_program(channels, classes)
    call = Call(classes, batch, channels, own, min(WORKERS, own), dtype)
    flat = rows.reshape(-1, ROWS, CHUNK)
    found = launch(
        partial(_program, call=call),
        (flat, taps.reshape(-1, ROWS, CHUNK), *tables(classes)),
        jax.typeof(flat),
        _scratch(call),
        grid=(classes, channels // own),
        axes=("class", "channels"),
        workers=call.workers,
        name="classes",
        interpret=interpret,
    )
    return found.reshape(rows.shape)


def _scratch(call: Call) -> Shared:
    tile = (2, ROWS, CHUNK)
    return Shared(
        rows=tile_ref(call.workers, PLACES, *tile, dtype=jnp.float16),
        taps=tile_ref(call.workers, *tile, dtype=jnp.float16),
        matrices=tile_ref(2, ROWS, 3 * CHUNK, dtype=jnp.float16),
        twiddles=tile_ref(*tile, dtype=jnp.float16),
        ready=plgpu.Barrier(num_arrivals=COPIES),
        taps_came=plgpu.Barrier(num_arrivals=2, num_barriers=call.workers),
        rows_came=plgpu.Barrier(num_arrivals=2, num_barriers=call.workers * PLACES),
    )


def load_tables(tables: Tables, matrices: Any, twiddles: Any, ready: Any) -> None:
    """Load the tables of the program's class, by one warpgroup.

    `ready` expects `COPIES` arrivals.
    """
    j = lax.axis_index("class")

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(tables.firsts.at[j], matrices.at[0], ready)
        plgpu.copy_gmem_to_smem(tables.matrix.at[0], matrices.at[1], ready)
        for part in range(2):
            plgpu.copy_gmem_to_smem(tables.twiddles.at[2 * j + part], twiddles.at[part], ready)


class Inner(NamedTuple):
    """The two stages of one class in shared memory: K_j and F, twiddles between."""

    matrices: Any
    twiddles: Any
    dtype: Any

    def transform(self, tile: Sequence[Any]) -> Complex:
        """Return S of G, which its own intermediate replaces."""
        first, last = self._dfts()
        store(tile, times(from_left(first, tile), parts_of(self.twiddles), dtype=self.dtype))
        return from_right(tile, last)

    def restore(self, tile: Sequence[Any]) -> None:
        """Put V of P in its place."""
        first, last = self._dfts()
        back = from_right(tile, last.conjugate())
        store(tile, times(back, parts_of(self.twiddles), conjugated=True, dtype=self.dtype))
        store(tile, from_left(first.adjoint(), tile))

    def _dfts(self) -> tuple[Dft, Dft]:
        return Dft(self.matrices.at[0]), Dft(self.matrices.at[1])


def spectrum_of_taps(inner: Inner, tile: Sequence[Any], classes: int) -> None:
    """Put H in place of G: sqrt(M) times the unitary transform.

    It is at most 1 for taps whose sizes add up to 2^14.
    """
    factor = (classes * TILE) ** 0.5 / 2**LARGEST_NORM
    real, imaginary = inner.transform(tile)
    store(tile, (real * factor, imaginary * factor))


def _program(*refs: Any, call: Call) -> None:
    """Run one class of some channels."""
    rows, taps, *constants, found, shared = refs
    load_tables(Tables(*constants), shared.matrices, shared.twiddles, shared.ready)
    worker = lax.axis_index("warpgroup")
    steps = (call.own - worker + call.workers - 1) // call.workers
    channels = _Channels(call, rows, taps, found, shared, worker, steps)
    channels.load_taps(worker * 0)
    channels.load_row(worker * 0)
    plgpu.barrier_wait(shared.ready)
    lax.fori_loop(0, steps, lambda i, _: channels.convolve(i), None)
    plgpu.wait_smem_to_gmem(0)


class _Channels(NamedTuple):
    """The work of one warpgroup: `steps` channels, all rows of each."""

    call: Call
    rows: Any
    taps: Any
    found: Any
    shared: Shared
    worker: Array
    steps: Array

    def load_taps(self, i: Array) -> None:
        """Load G of the i-th own channel's taps."""
        channel = self.call.channel(self.worker, i)
        for part in range(2):
            source = self.taps.at[self.call.taps(part, channel)]
            place = self.shared.taps.at[self.worker, part]
            plgpu.copy_gmem_to_smem(source, place, self.shared.taps_came.at[self.worker])

    def load_row(self, step: Array) -> None:
        """Load G of a row, of all own channels' one after the other."""
        came = self.shared.rows_came.at[self.worker * PLACES + lax.rem(step, PLACES)]
        for part, place in enumerate(self._tile(step)):
            plgpu.copy_gmem_to_smem(self.rows.at[self._index(step, part)], place, came)

    def convolve(self, i: Array) -> None:
        """Convolve one channel, and load the next."""
        shared, batch = self.shared, self.call.batch
        taps = [shared.taps.at[self.worker, part] for part in range(2)]
        plgpu.barrier_wait(shared.taps_came.at[self.worker])
        spectrum_of_taps(self._inner(), taps, self.call.classes)
        lax.fori_loop(0, batch, lambda row, _: self._convolve_row(i, row, taps), None)

    def _convolve_row(self, i: Array, row: Array, taps: Sequence[Any]) -> None:
        shared, step = self.shared, i * self.call.batch + row
        tile, inner = self._tile(step), self._inner()
        # Wait until the row before has left the other place.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(step + 1 < self.steps * self.call.batch)(lambda: self.load_row(step + 1))
        plgpu.barrier_wait(shared.rows_came.at[self.worker * PLACES + lax.rem(step, PLACES)])
        store(tile, times(inner.transform(tile), taps, dtype=self.call.dtype))
        last = (row == self.call.batch - 1) & (i + 1 < self.steps)
        pl.when(last)(lambda: self.load_taps(i + 1))
        inner.restore(tile)
        for part, place in enumerate(tile):
            plgpu.copy_smem_to_gmem(place, self.found.at[self._index(step, part)])

    def _inner(self) -> Inner:
        return Inner(self.shared.matrices, self.shared.twiddles, self.call.dtype)

    def _tile(self, step: Array) -> list[Any]:
        return [self.shared.rows.at[self.worker, lax.rem(step, PLACES), part] for part in range(2)]

    def _index(self, step: Array, part: int) -> Array:
        batch = self.call.batch
        return self.call.row(part, lax.rem(step, batch), self.call.channel(self.worker, lax.div(step, batch)))
