"""The core of a slot memory: intervals one after another, over rows that are whole or continue a state."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.open_chunk import OpenChunk, append, lay_out, left_open, no_tokens, take_back
from jaxblt.mixers.slots.experimental.slot_bank import (
    Candidates,
    SlotBank,
    empty_bank,
    free,
    read_slots,
    unused,
    write_candidates,
)
from jaxblt.mixers.slots.experimental.slot_compression import (
    compress,
    count_latents,
    kept_latents,
    reconstruction_error,
)
from pallas_kernels.neural_memory import (
    choose,
    cut_rows,
    leave_windows,
    multiply,
    scan_windows,
    take_windows,
    window_size,
)


@flax.struct.dataclass
class SlotStreams:
    """The streams of tokens for the slots.

    Attributes:
      q: queries of reads.
      k: keys, by which latents pool.
      u: gated contents.
      chosen: at the last token of an interval the slots that each candidate is written to and, last, those that are
        freed, where they are given.
    """

    q: Float[Array, "B T H M"]
    k: Float[Array, "B T H M"]
    u: Float[Array, "B T H M"]
    chosen: Bool[Array, "B T H _ S"] | None = None

    @property
    def kept(self) -> tuple[Array, Array, Array]:
        """The streams that an open interval keeps of its tokens."""
        return self.q, self.k, self.u


@flax.struct.dataclass
class SlotCarry:
    """The slots and open interval that a head carries from token to token.

    Attributes:
      bank: slots behind the document's last whole interval.
      opened: q, k and u since then.
    """

    bank: SlotBank
    opened: OpenChunk


@flax.struct.dataclass
class SlotTrace:
    """A trace of writes, without gradients. Per token it is zero except at the last of each interval with a token.

    Attributes:
      writes: 1.
      utilisation: share of slots that hold something behind the write.
      latents: candidates that were written.
      error: share of the tokens' energy that these cannot give back.
    """

    writes: Float[Array, "B *T H"]
    utilisation: Float[Array, "B *T H"]
    latents: Float[Array, "B *T H"]
    error: Float[Array, "B *T H"]


@flax.struct.dataclass
class SlotSide:
    """The side results of a run, where they are asked for; `chosen` as in `SlotStreams`."""

    trace: SlotTrace | None = None
    chosen: Bool[Array, "B *T H _ S"] | None = None


@flax.struct.dataclass
class SlotCore:
    """Core of a slot memory; outputs are what tokens read and a `SlotSide`.

    Attributes:
      latents, places: of the compression, see `compress`.
      address: from a candidate to the query that slots are compared with.
      sink: key and value of what is read where no slot fits.
      config: a `SlotMemoryConfig`.
      traced: return a trace.
      telling: return the chosen slots.
    """

    latents: Float[Array, "H L M"]
    places: Float[Array, "H L C"]
    address: Float[Array, "H M M"]
    sink: Float[Array, "H 2 M"]
    config: Any = flax.struct.field(pytree_node=False)
    traced: bool = flax.struct.field(pytree_node=False)
    telling: bool = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(
        pytree_node=False, default=("latents", "places", "address", "sink")
    )

    def zero(self, streams: SlotStreams) -> SlotCarry:
        """Return free slots, and no tokens."""
        bank = empty_bank(streams.q[:, 0, :, 0], self.config.slots, streams.q.shape[-1])
        return SlotCarry(bank, no_tokens(streams.kept, self.config.interval))

    def run(
        self, streams: SlotStreams, marks: Marks, carry: SlotCarry | None
    ) -> tuple[tuple[Float[Array, "B T H M"], SlotSide], SlotCarry | None]:
        """Return what tokens read; with a carry also what is carried behind the stretch."""
        if carry is None:
            bank = self.zero(streams).bank
            return self._windows(streams, marks.segment_ids, bank, aligned=self.config.aligned)[0], None
        if streams.q.shape[1] == 1:
            return self._one(streams, marks, carry)
        laid = lay_out(carry.opened, streams.kept, marks)
        (y, side), bank = self._windows(
            SlotStreams(*laid.streams), laid.segment_ids, carry.bank, aligned=laid.whole
        )
        opened = left_open(laid, self.config.interval)
        return (take_back(y, laid, streams.q.shape[1]), side), SlotCarry(bank, opened)

    def _one(self, streams: SlotStreams, marks: Marks, carry: SlotCarry) -> Any:
        """Take one token: a read, and a write where its interval is full."""
        kind = streams.q.dtype
        y, _ = read_slots(carry.bank, jnp.moveaxis(streams.q, 1, 2), self.sink, kind)
        # Read before the write: XLA would copy the slots at each token to keep what is still to be read
        y, before = jax.lax.optimization_barrier((y, carry.bank))
        opened, full = append(carry.opened, streams.kept, marks)
        parts = tuple(x.astype(kind) for x in opened.streams)

        def write() -> SlotBank:
            after, _ = self.write(before, parts, opened.content[:, 0], None)
            return choose(full, after, before)

        bank = jax.lax.cond(jnp.any(full), write, lambda: before)
        left = dataclasses.replace(opened, count=jnp.where(full[:, None], 0, opened.count))
        return (jnp.moveaxis(y, 2, 1).astype(kind), SlotSide()), SlotCarry(bank, left)

    def _windows(
        self, streams: SlotStreams, ids: Int[Array, "B T"] | None, bank: SlotBank, *, aligned: bool
    ) -> tuple[tuple[Float[Array, "B T H M"], SlotSide], SlotBank]:
        """Return outputs and the bank behind rows, window by window.

        See `pallas_kernels.neural_memory.windows`.
        """
        (rows, length), interval = streams.q.shape[:2], self.config.interval
        width = window_size(interval, length)
        cut, source = cut_rows(ids, (rows, length), width, aligned=aligned)
        if width < interval:  # a window is no interval: none ends
            cut = cut._replace(ends=jnp.zeros_like(cut.ends))
        content = jnp.ones((rows, length), bool) if ids is None else ids > 0
        content = take_windows(content[:, :, None], width, source)[:, :, 0]
        parts = tuple(take_windows(x, width, source) for x in streams.kept)
        asked = None if source is None else take_windows(streams.q, width)
        told = None if streams.chosen is None else take_windows(streams.chosen, width, source)[:, :, :, -1]
        fresh, kind = self.zero(streams).bank, streams.q.dtype

        def step(bank: SlotBank, window: Any) -> tuple[SlotBank, Any]:
            asked, parts, content, told, cut = window
            bank = choose(cut.begins, fresh, bank)
            asked = parts[0] if asked is None else asked
            y, _ = read_slots(bank, asked, self.sink, kind)
            written, side = self.write(bank, parts, content, told)
            after = choose(cut.ends, written, bank)
            if cut.at is not None:
                y = self._read_behind(y, asked, after, cut)
                after = choose(cut.leaves, fresh, after)
            return after, (y.astype(kind), _at_ends(side, cut, width))

        after, found = scan_windows(step, bank, (asked, parts, content, told, cut))
        return jax.tree.map(lambda x: leave_windows(x, length), found), after

    def _read_behind(
        self, y: Float[Array, "B H C M"], q: Float[Array, "B H C M"], after: SlotBank, cut: Any
    ) -> Float[Array, "B H C M"]:
        """Return what a window's tokens read behind an interval's end or another document's begin."""
        places = jnp.arange(q.shape[2], dtype=jnp.int32)[None]
        behind = cut.ends[:, None] & (places >= cut.at[:, None])
        y = jnp.where(behind[:, None, :, None], read_slots(after, q, self.sink, q.dtype)[0], y)
        return jnp.where(cut.first[:, None, :, None], y, self.sink[None, :, 1, None])

    def write(
        self, bank: SlotBank, parts: tuple[Array, ...], content: Bool[Array, "B C"], told: Any
    ) -> tuple[SlotBank, SlotSide]:
        """Return the bank behind an interval; one without a token leaves it as it is."""
        (q, k, u), config, kind = parts, self.config, parts[0].dtype
        count = jnp.sum(content, 1, dtype=jnp.int32)
        _, weights = read_slots(bank, q, self.sink, kind)
        weights = jnp.where(content[:, None, :, None], weights, 0)
        reads = jnp.sum(weights, 2) / jnp.maximum(count, 1).astype(weights.dtype)[:, None, None]
        s = compress(self.latents, self.places, k, u, content, kind)
        measured = self.traced or config.adaptive_error is not None
        error = reconstruction_error(s, u, content) if measured else None
        counts = jnp.asarray(count_latents(config.ratio, config.interval), jnp.int32)[count]
        kept = kept_latents(error, counts, s.shape[2], config.adaptive_error)
        order = lambda x: jnp.moveaxis(x, 2, 0)  # noqa: E731
        chosen, gone = (None, None) if told is None else (order(told[:, :, :-1]), told[:, :, -1])
        there = jnp.arange(s.shape[2], dtype=jnp.int32)[None, None] < kept[..., None]
        there = jnp.broadcast_to(there, s.shape[:3])
        query = multiply("bhlm,hmn->bhln", s, self.address, kind)
        offered = Candidates(order(s), order(query), order(there), chosen)
        after, chosen = write_candidates(bank, reads, offered, config)
        gone = unused(after, config) if gone is None else gone
        after = choose(count > 0, free(after, gone), bank)
        return after, self._told(after, kept, error, chosen, gone, count > 0)

    def _told(self, bank: SlotBank, kept: Any, error: Any, chosen: Any, gone: Any, some: Any) -> SlotSide:
        """Return what a write tells; nothing was written in the rows without a token."""
        trace, choices = None, None
        if self.traced:
            share = jnp.mean(bank.valid, -1, dtype=jnp.float32)
            kept = jnp.broadcast_to(kept, share.shape)
            last = jnp.maximum(kept, 1)[..., None] - 1
            left = jnp.take_along_axis(error, last, -1)[..., 0]
            found = (jnp.ones_like(share), share, kept.astype(jnp.float32), left)
            found = (jnp.where(some[:, None], x, 0) for x in found)
            trace = SlotTrace(*(jax.lax.stop_gradient(x) for x in found))
        if self.telling:
            choices = jnp.concatenate([jnp.moveaxis(chosen, 0, 2), gone[:, :, None]], 2)
        return SlotSide(trace, choices)


def _at_ends(side: SlotSide, cut: Any, width: int) -> SlotSide:
    """Put what writes tell at the last token of each interval that ends in the window."""
    last = width if cut.at is None else cut.at[:, None]
    ended = cut.ends[:, None] & (jnp.arange(width, dtype=jnp.int32)[None] == last - 1)

    def put(x: Array) -> Array:
        mask = ended.reshape(ended.shape[0], 1, width, *(1,) * (x.ndim - 2))
        return jnp.where(mask, x[:, :, None], jnp.zeros((), x.dtype))

    return jax.tree.map(put, side)
