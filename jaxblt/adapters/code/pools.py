"""Sums along a document: over the chunk before, over a prefix, and with a decay.

Chunk k of a document is the steps kC..kC+C-1 of its own time, which counts holes and padding does not move. Holes take
time and hold nothing. Everything here is a sum along the sequence, so it is a core of the sequence driver
(`driver.sequence`): rows may be whole, streamed in any split, or split over the devices of a mesh axis `seq`.
"""

from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.marks import Marks
from pallas_kernels.linear_scan import decayed, linear_scan


@flax.struct.dataclass
class ChunkState:
    """Sums over the chunks of a document.

    Attributes:
      open: of the latest chunk, whole or not.
      past: of the chunks that ended, the latest first; zero before the document's first.
    """

    open: Float[Array, "B F"]
    past: Float[Array, "B L F"]


@flax.struct.dataclass
class ChunkEffect:
    """Effect of a stretch of tokens on the sums before it.

    Attributes:
      open: added to the open chunk's sums, once they are multiplied by `factor` [B, 1].
      ended: sums of the chunks that ended in the stretch, the latest first.
      count: how many there are, at most L.
      opened: 1 at the chunk of `ended` that began before the stretch.
      stays: rows whose last document began before the stretch.
    """

    open: Float[Array, "B F"]
    factor: Float[Array, "B 1"]
    ended: Float[Array, "B L F"]
    count: Int[Array, "B"]
    opened: Float[Array, "B L"]
    stays: Bool[Array, "B"]


@flax.struct.dataclass
class ChunkSums:
    """Core of sums over chunks. Streams are x [B, T, F], in fp32 and 0 at holes, and the time [B, T].

    Attributes:
      size: steps C of a chunk.
      lag: chunks back that a token reads, L.
      aligned: whether rows are whole and their documents start at multiples of C: a chunk's tokens lie together then.
    """

    size: int = flax.struct.field(pytree_node=False)
    lag: int = flax.struct.field(pytree_node=False)
    aligned: bool = flax.struct.field(pytree_node=False, default=False)

    def zero(self, streams: Any) -> ChunkState:
        """Return sums of nothing."""
        x = streams[0]
        nothing = jnp.zeros((x.shape[0], self.lag, x.shape[2]), jnp.float32)
        return ChunkState(nothing[:, 0], nothing)

    def run(
        self, streams: Any, marks: Marks, carry: ChunkState | None
    ) -> tuple[Float[Array, "B T F"], ChunkEffect | None]:
        """Return for each token the sums of the chunk `lag` before its own, zero where there is none."""
        x, time = streams
        if self.aligned:
            return self._by_chunk(x, time), None
        live = jnp.ones(time.shape, bool) if marks.segment_ids is None else marks.segment_ids != 0
        starts = live & (time % self.size == 0)
        entered = carry is not None
        chunk = _running(starts, x, carry.open if entered else None)
        past = carry.past if entered else self.zero(streams).past
        effect = self._effect(time, marks, chunk, starts, entered=entered)
        return self._earlier(time, chunk, past), effect

    def _by_chunk(self, x: Float[Array, "B T F"], time: Int[Array, "B T"]) -> Float[Array, "B T F"]:
        """Return sums of whole chunks: tokens are added once, and no sum stands at each."""
        began = time[:, :: self.size]
        chunk = _summed(x, self.size)
        earlier = jnp.pad(chunk, ((0, 0), (self.lag, 0), (0, 0)))[:, : chunk.shape[1]]
        earlier = jnp.where((began // self.size >= self.lag)[..., None], earlier, 0.0)
        return jnp.repeat(earlier, self.size, 1)[:, : time.shape[1]]

    def _earlier(
        self, time: Int[Array, "B T"], chunk: Float[Array, "B T F"], past: Float[Array, "B L F"]
    ) -> Float[Array, "B T F"]:
        """Return the sums `lag` chunks before each token's: in the stretch, or of those that ended before it."""
        index = jnp.arange(time.shape[1], dtype=jnp.int32)[None]
        end = index - time % self.size - 1 - (self.lag - 1) * self.size
        here = jnp.take_along_axis(chunk, jnp.maximum(end, 0)[..., None], 1)
        ended = time // self.size - time[:, :1] // self.size
        slot = jnp.clip(self.lag - 1 - ended, 0, self.lag - 1)
        there = jnp.take_along_axis(past, slot[..., None], 1)
        found = jnp.where((end >= 0)[..., None], here, there)
        return jnp.where((time // self.size >= self.lag)[..., None], found, 0.0)

    def _effect(self, time: Any, marks: Marks, chunk: Any, starts: Any, *, entered: bool) -> ChunkEffect:
        """Return the effect of a stretch that ran from zero sums, or from those that it was `entered` with."""
        rows = time.shape[:1]
        end, stays = marks.end, marks.stays
        last = jnp.full(rows, time.shape[1] - 1, jnp.int32) if end is None else jnp.maximum(end - 1, 0)
        stays = jnp.ones(rows, bool) if stays is None else stays
        first = jnp.where(stays, time[:, 0], 0)
        after = jnp.take_along_axis(time, last[:, None], 1)[:, 0] + 1
        total = jnp.maximum(after // self.size - first // self.size, 0)
        slot = jnp.arange(self.lag, dtype=jnp.int32)[None]
        place = (last - after % self.size)[:, None] - slot * self.size
        ended = jnp.take_along_axis(chunk, jnp.maximum(place, 0)[..., None], 1)
        ended = jnp.where((slot < total[:, None])[..., None], ended, 0.0)
        opened = (stays & (first % self.size != 0))[:, None] & (slot == total[:, None] - 1)
        own = jnp.float32(not entered)
        return ChunkEffect(
            open=chunk[:, -1],
            factor=(~jnp.any(starts, 1, keepdims=True)).astype(jnp.float32) * own,
            ended=ended,
            count=jnp.minimum(total, self.lag),
            opened=opened.astype(jnp.float32) * own,
            stays=stays,
        )

    def join(self, carry: ChunkState, summary: ChunkEffect) -> ChunkState:
        """Return the sums behind a stretch."""
        ended = summary.ended + decayed(summary.opened[..., None], carry.open[:, None])
        past = jnp.where(summary.stays[:, None, None], carry.past, 0.0)
        slot, count = jnp.arange(self.lag, dtype=jnp.int32)[None], summary.count[:, None]
        index = jnp.where(slot < count, slot, self.lag + slot - count)
        return ChunkState(
            open=decayed(summary.factor, carry.open) + summary.open,
            past=jnp.take_along_axis(jnp.concatenate([ended, past], 1), index[..., None], 1),
        )


def _running(
    starts: Bool[Array, "B T"], x: Float[Array, "B T F"], initial: Float[Array, "B F"] | None
) -> Float[Array, "B T F"]:
    """Return sums up to each token, from the latest start."""
    keep = jnp.broadcast_to(1.0 - starts[..., None].astype(jnp.float32), x.shape)
    return linear_scan(keep, x, initial=initial)


def _summed(x: Float[Array, "B T F"], size: int) -> Float[Array, "B N F"]:
    """Return sums over the tokens of each chunk of a row, of which the last may be short."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0)))
    return jnp.sum(x.reshape(x.shape[0], -1, size, x.shape[2]), 2)


@flax.struct.dataclass
class Smooth:
    """Core of e_t = a_t e_{t-1} + b_t, zero where a document begins.

    Streams are a, [B, T, 1] or [B, T, E], and b, [B, T, E], in fp32.
    """

    def zero(self, streams: Any) -> Float[Array, "B E"]:
        """Return e before the first token."""
        return jnp.zeros(streams[1][:, 0].shape, jnp.float32)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B E"] | None
    ) -> tuple[Float[Array, "B T E"], tuple[Float[Array, "B #E"], Float[Array, "B E"]]]:
        """Return e at each token, and what the stretch does to a carry: a factor, and what is added."""
        keep, added = streams
        if marks.new is not None and marks.segment_ids is not None:
            live = (marks.segment_ids != 0)[..., None]
            keep = jnp.where(marks.new[..., None], 0.0, jnp.where(live, keep, 1.0))
            added = jnp.where(live, added, 0.0)
        e = linear_scan(jnp.broadcast_to(keep, added.shape), added, initial=carry)
        factor = jnp.prod(keep, 1) if carry is None else jnp.zeros_like(keep[:, 0])
        return e, (factor, e[:, -1])

    def join(self, carry: Float[Array, "B E"], summary: tuple[Any, Any]) -> Float[Array, "B E"]:
        """Return e behind the stretch."""
        factor, added = summary
        return decayed(factor, carry) + added


@flax.struct.dataclass
class ChunkwiseSums:
    """Core of `Smooth`'s sums in whole rows whose documents start at multiples of C; a is 0 there and else 1.

    Tokens are added once, and each has the sums up to its chunk's end: they are right from the last addition on.

    Attributes:
      size: steps C of a chunk.
    """

    size: int = flax.struct.field(pytree_node=False)

    def zero(self, streams: Any) -> Float[Array, "B E"]:
        """Return e before the first token."""
        return Smooth().zero(streams)

    def run(self, streams: Any, marks: Marks, carry: None) -> tuple[Float[Array, "B T E"], None]:
        """Return e at the end of each token's chunk."""
        keep, added = streams
        chunk = _summed(added, self.size)
        e = linear_scan(jnp.broadcast_to(keep[:, :: self.size], chunk.shape), chunk)
        return jnp.repeat(e, self.size, 1)[:, : added.shape[1]], None
