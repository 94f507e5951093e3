"""The Hopper kernel of classes for gradients, from G of u and of v = post_gate dy.

With the spectra of `mosaic_gpu_classes`, each class by itself:

    y = A^H (H U),    du = A^H (conj(H) V),    dh = A^H (sum over rows of conj(U) V)

A program takes one class and some channels, a warpgroup one channel after the other and all of its rows. So the sum
stays on chip in fp32 and is added up in one order. It leaves in fp16: each row has a weight that undoes its scales, and
one power of two for all of a channel's rows bounds the sum. Spectra are only in shared memory.
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
from pallas_kernels.long_conv.mosaic_gpu_classes import (
    COPIES,
    Call,
    Inner,
    Tables,
    load_tables,
    spectrum_of_taps,
    tables,
)
from pallas_kernels.long_conv.mosaic_gpu_launch import launch
from pallas_kernels.long_conv.mosaic_gpu_products import by_row, spread, store, times

WORKERS = 2
"""Warpgroups whose rows and taps fit into shared memory, and whose products' sums fit into registers."""


class Gradients(NamedTuple):
    """Tiles of y, of u's gradient and of the taps'; y is None where nobody asks."""

    y: Float[Array, "P B D 64 64"] | None
    du: Float[Array, "P B D 64 64"]
    taps: Float[Array, "P D 64 64"]


class Shared(NamedTuple):
    """Shared memory; `taps` holds G, then H; `sent` u's tile, and at last the sum in fp16; `got` v's."""

    sent: Any
    got: Any
    taps: Any
    sums: Any
    weights: Any
    matrices: Any
    twiddles: Any
    ready: Any
    sent_came: Any
    got_came: Any
    taps_came: Any


def differentiate_classes(
    taps: Float[Array, "P D 64 64"],
    sent: Float[Array, "P B D 64 64"],
    got: Float[Array, "P B D 64 64"],
    weights: Float[Array, "B D"],
    *,
    gated: bool,
    interpret: bool,
    dtype: Any = jnp.float32,
) -> Gradients:
    """Return gradients from G of taps, of u and of v; `gated` asks for y.

    `weights` are those of each row's conj(U) V in the sum.
    """
    parts, batch, channels = sent.shape[:3]
    classes = parts // 2
    own = rows_per_program(channels, classes)
    call = Call(classes, batch, channels, own, min(WORKERS, own), dtype)
    flat = [z.reshape(-1, ROWS, CHUNK) for z in (sent, got, taps)]
    spread_weights = jnp.broadcast_to(weights.reshape(-1, 1), (batch * channels, CHUNK))
    rows = jax.typeof(flat[0])
    *found, sums = launch(
        partial(_program, call=call),
        (*flat, spread_weights, *tables(classes)),
        (
            *((rows, rows) if gated else (rows,)),
            varying_like(flat[0], (parts * channels, ROWS, CHUNK), jnp.float16),
        ),
        _scratch(call),
        grid=(classes, channels // own),
        axes=("class", "channels"),
        workers=call.workers,
        name="classes_vjp",
        interpret=interpret,
    )
    *y, du = (z.reshape(sent.shape) for z in found)
    return Gradients(y[0] if gated else None, du, sums.reshape(taps.shape))


def _scratch(call: Call) -> Shared:
    tile, half = (2, ROWS, CHUNK), jnp.float16
    return Shared(
        sent=tile_ref(call.workers, *tile, dtype=half),
        got=tile_ref(call.workers, *tile, dtype=half),
        taps=tile_ref(call.workers, *tile, dtype=half),
        sums=tile_ref(call.workers, *tile, dtype=jnp.float32),
        weights=plgpu.SMEM((call.workers, ROWS), jnp.float32),
        matrices=tile_ref(2, ROWS, 3 * CHUNK, dtype=half),
        twiddles=tile_ref(*tile, dtype=half),
        ready=plgpu.Barrier(num_arrivals=COPIES),
        sent_came=plgpu.Barrier(num_arrivals=2, num_barriers=call.workers),
        got_came=plgpu.Barrier(num_arrivals=3, num_barriers=call.workers),
        taps_came=plgpu.Barrier(num_arrivals=2, num_barriers=call.workers),
    )


def _program(*refs: Any, call: Call) -> None:
    """Run one class of some channels."""
    sent, got, taps, weights, *constants = refs[:7]
    *found, shared = refs[7:]
    load_tables(Tables(*constants), shared.matrices, shared.twiddles, shared.ready)
    worker = lax.axis_index("warpgroup")
    steps = (call.own - worker + call.workers - 1) // call.workers
    channels = _Channels(call, sent, got, taps, weights, found, shared, worker, steps)
    channels.load_taps(worker * 0)
    channels.load_sent(worker * 0)
    channels.load_got(worker * 0)
    plgpu.barrier_wait(shared.ready)
    lax.fori_loop(0, steps, lambda i, _: channels.differentiate(i), None)
    plgpu.wait_smem_to_gmem(0)


class _Channels(NamedTuple):
    """The work of one warpgroup: `steps` channels, all rows of each; `found` are y, if asked for, du and the sums."""

    call: Call
    sent: Any
    got: Any
    taps: Any
    weights: Any
    found: Sequence[Any]
    shared: Shared
    worker: Array
    steps: Array

    def load_taps(self, i: Array) -> None:
        """Load G of the i-th own channel's taps."""
        for part, place in enumerate(self._tile(self.shared.taps)):
            self._load(self.taps.at[self._index_of_taps(i, part)], place, self.shared.taps_came)

    def load_sent(self, step: Array) -> None:
        """Load G of a row of u, of all own channels' one after the other."""
        for part, place in enumerate(self._tile(self.shared.sent)):
            self._load(self.sent.at[self._index(step, part)], place, self.shared.sent_came)

    def load_got(self, step: Array) -> None:
        """Load G of a row of v, and the row's weight."""
        for part, place in enumerate(self._tile(self.shared.got)):
            self._load(self.got.at[self._index(step, part)], place, self.shared.got_came)
        row, channel = self._row(step)
        weight = self.weights.at[row * self.call.channels + channel]
        self._load(weight, self.shared.weights.at[self.worker], self.shared.got_came)

    def _load(self, source: Any, place: Any, came: Any) -> None:
        plgpu.copy_gmem_to_smem(source, place, came.at[self.worker])

    def differentiate(self, i: Array) -> None:
        """Differentiate one channel, and load the next."""
        shared = self.shared
        taps, sent = self._tile(shared.taps), self._tile(shared.sent)
        plgpu.barrier_wait(shared.taps_came.at[self.worker])
        spectrum_of_taps(self._inner(), taps, self.call.classes)
        for total in self._tile(shared.sums):
            total[...] = zeros()
        lax.fori_loop(0, self.call.batch, lambda row, _: self._differentiate_row(i, row), None)
        real, imaginary = (read(total) for total in self._tile(shared.sums))
        store(sent, (real, imaginary))
        self._inner().restore(sent)
        self._leave(sent, self.found[-1], lambda part: self._index_of_taps(i, part))
        pl.when(i + 1 < self.steps)(lambda: self.load_sent((i + 1) * self.call.batch))

    def _differentiate_row(self, i: Array, row: Array) -> None:
        """Differentiate one row; `sent` is left free after the last."""
        call, shared, inner = self.call, self.shared, self._inner()
        sent, got, taps = (self._tile(ref) for ref in (shared.sent, shared.got, shared.taps))
        step = i * call.batch + row
        plgpu.barrier_wait(shared.sent_came.at[self.worker])
        store(sent, inner.transform(sent))
        plgpu.barrier_wait(shared.got_came.at[self.worker])
        v = inner.transform(got)
        weight = spread(by_row(shared.weights.at[self.worker]))
        shares = times(v, sent, conjugated=True)
        for total, share in zip(self._tile(shared.sums), shares, strict=True):
            total[...] = read(total) + share * weight
        store(got, times(v, taps, conjugated=True, dtype=call.dtype))
        gated = len(self.found) == 3
        if gated:
            u = [read(part).astype(call.dtype) for part in sent]
            store(sent, times((u[0], u[1]), taps, dtype=call.dtype))
        last = row == call.batch - 1
        pl.when(last & (i + 1 < self.steps))(lambda: self.load_taps(i + 1))
        if gated:
            inner.restore(sent)
            self._leave(sent, self.found[0], lambda part: self._index(step, part))
        pl.when(~last)(lambda: self.load_sent(step + 1))
        inner.restore(got)
        self._leave(got, self.found[-2], lambda part: self._index(step, part))
        pl.when(step + 1 < self.steps * call.batch)(lambda: self.load_got(step + 1))

    def _leave(self, tile: Sequence[Any], array: Any, index: Any) -> None:
        """Store a tile to device memory; its place is free after that."""
        for part, place in enumerate(tile):
            plgpu.copy_smem_to_gmem(place, array.at[index(part)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _inner(self) -> Inner:
        return Inner(self.shared.matrices, self.shared.twiddles, self.call.dtype)

    def _tile(self, ref: Any) -> list[Any]:
        return [ref.at[self.worker, part] for part in range(2)]

    def _row(self, step: Array) -> tuple[Array, Array]:
        """Return row and channel of a step."""
        return lax.rem(step, self.call.batch), self.call.channel(self.worker, lax.div(step, self.call.batch))

    def _index(self, step: Array, part: int) -> Array:
        return self.call.row(part, *self._row(step))

    def _index_of_taps(self, i: Array, part: int) -> Array:
        return self.call.taps(part, self.call.channel(self.worker, i))
