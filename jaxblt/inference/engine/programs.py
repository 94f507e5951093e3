"""The device's part of a lane: rows that decode together, and prompts that are read and put into rows.

A lane has one program that decodes. Each size of short pieces has one program, which reads the ends of all waiting
prompts straight into their rows. It reads some prompts in each turn of a loop. Their number in a turn depends on the
lane and the size only, and missing ones are padding. So a prompt is rounded alike whatever the load. All that requests
ask for is an array to these programs. Longer pieces, and prompts whose states are kept, are read beside the rows.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.update.row_adapters import Adapter
from jaxblt.data.vocab import EOS, PAD, VOCAB_SIZE
from jaxblt.inference.decode import Decoder, DecoderState, decode_step, init_decoder
from jaxblt.inference.engine.config import Lane, Request
from jaxblt.inference.engine.draws import Drawn, Table, blank_table, pack_draws, predictions
from jaxblt.inference.engine.memory import shrink_lane
from jaxblt.inference.engine.row_codes import choose_codes_of_rows
from jaxblt.inference.in_place import (
    IN_ONE_GRAPH,
    ONE_LOOP_IN_ONE_GRAPH,
    Layout,
    keep_layout,
    layout_over_devices,
)
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import Prefix, begin_prompts, read_piece
from jaxblt.inference.requests import Requests, request_keys
from jaxblt.inference.rows import put_rows, take_rows
from jaxblt.inference.sampling import alphabet_table, draw_noise, sample_by, sampling_arrays
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.inference.waiting import MOST_STEPS, Waiting, may_wait, none_waiting, step_or_wait
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.packed import Packed, pack_small
from jaxblt.show import show

STEPS = 8
"""Steps of a round. Each draws a byte for every row that does not stand still at the edge of a patch."""

SHORT_PIECES = (64, 256)
"""Sizes of pieces of prompts below the largest."""

SHARE_READ = 4
"""Rows of a lane to each prompt that a call reads: the states of prompts lie beside the lane's."""

NO_ROW = 2**30
"""First row number of padding prompts: it lies beyond all rows, so their writes are dropped."""


MakePart = Callable[..., Any]
"""(rows, prompts, ...) -> rows, of a lane: `LanePrograms.part`."""

OnePrompt = tuple[DecoderState, Float[Array, "1 V"], Bool[Array, "1"]]
"""A prompt of those of a `Prefix`."""


@flax.struct.dataclass
class LaneRows:
    """The rows of a lane.

    Attributes:
      state: of the decoder.
      logits: of each row's next byte.
      done: rows that draw nothing.
      drawn: bytes of each request so far.
      counts: how often each request has drawn each id.
      requests: what each asks for.
      penalties: for each drawing of an id, and for an id that was drawn.
      chosen: codes in the place of the router's, as of `choose_adapters`; empty for a model without a router.
      waiting: rows that stand still; None if none ever does.
    """

    state: DecoderState
    logits: Float[Array, "S V"]
    done: Bool[Array, "S"]
    drawn: Int[Array, "S"]
    counts: Int[Array, "S V"]
    requests: Requests
    penalties: Float[Array, "S 2"]
    chosen: dict[str, Any]
    waiting: Waiting | None

    __repr__ = show


class LanePrograms:
    """A lane on the device.

    Attributes:
      decoder: models and patcher.
      params: of the decoder, as of `prepare_decoding`.
    """

    def __init__(self, decoder: Decoder, params: dict[str, Any], lane: Lane, piece_bytes: int) -> None:
        """Prepare parameters and empty rows.

        Args:
          decoder: models and patcher.
          params: {"model": ..., "entropy": ...}, unboxed.
          lane: rows and capacity.
          piece_bytes: of prompts that one call reads, padding included.
        """
        self.decoder, self._apart, self._lane = decoder, unrolled(decoder), lane
        self._piece_bytes = piece_bytes
        self.params = prepare_decoding(decoder, params, rows=lane.slots, num_bytes=lane.capacity)
        self._anchor = _find_anchor(self.params)
        self._rows = self.make_rows()
        self._layout = layout_over_devices(self._rows)
        self._spare = self._make_spare()
        self._live = np.zeros(lane.slots, bool), jnp.zeros(lane.slots, bool)
        self._blank = self.begin()
        self._prompt_layout = layout_over_devices(self._blank)
        rows = self._rows.unpack()
        layers = {**unroll_params(self.params), CHOSEN: rows.chosen}
        # Leave the codes to the rows: those here would be used up with them
        self._narrow = narrow_params(self._apart, lane.slots, layers, rows.state) | {CHOSEN: {}}

    @property
    def lane(self) -> Lane:
        """Rows and capacity."""
        return self._lane

    @property
    def draws(self) -> tuple[int, int]:
        """The least and the most bytes that a round draws for a row that goes on."""
        return STEPS // (1 + MOST_STEPS) if may_wait(self.decoder, self._lane.slots) else STEPS, STEPS

    def fit(self) -> None:
        """Decode once without requests, with half the rows as long as the device has not the memory for all.

        Raises:
          JaxRuntimeError: one row does not fit.
        """
        while True:
            try:
                jax.block_until_ready(self.decode(set()))
                return
            except jax.errors.JaxRuntimeError as error:
                self.shrink(error)

    def shrink(self, error: Exception) -> None:
        """Halve the rows, or raise an error that more memory would not help."""
        self._lane = shrink_lane(self._lane, error)
        # Free the rows first: both would not fit
        del self._rows
        self._rows, self._spare = self.make_rows(), self._make_spare()

    def make_rows(self) -> Packed:
        """Return rows that are all done."""
        return _empty(self.decoder, self._lane, self._anchor)

    def _make_spare(self) -> Table | None:
        """Return a table whose memory the next draws take; None on several devices, where XLA lays it out."""
        return None if self._layout else _blank(self._lane.slots, self._anchor)

    def count_to_read(self, length: int) -> int:
        """Return how many ids of a prompt are read before it enters its row."""
        return length

    def count_prompts(self, size: int) -> int:
        """Return how many prompts one call reads in rows of `size`."""
        return max(1, min(self._piece_bytes // size, self._lane.slots // SHARE_READ)) if size else 1

    def begin(self, rows: int = 1) -> Prefix:
        """Return prompts of which nothing was read."""
        return _begin(self.decoder, self._lane, rows, self._anchor)

    def read(
        self,
        before: Sequence[OnePrompt | None],
        ids: Sequence[np.ndarray],
        size: int,
        adapters: Sequence[Adapter] = (),
    ) -> tuple[Prefix, Array]:
        """Read the next ids of some prompts in rows of `size`; `before` is used up.

        Args:
          before: each prompt so far, None at its beginning; at most `count_prompts(size)`.
          ids: of each.
          size: of the rows.
          adapters: of each; none at all stand for None.

        Returns the prompts as rows of one `Prefix`, and an array to wait for, which no later call uses up.
        """
        rows = self.count_prompts(size)
        table, live = np.full((rows, size), PAD, np.int32), np.zeros((rows, size), bool)
        for row, piece in enumerate(ids):
            table[row, : len(piece)], live[row, : len(piece)] = piece, True
        chosen = choose_codes_of_rows(self.decoder.model, _filled(adapters, None, rows))
        params = {**self.params, CHOSEN: chosen}
        return _read(self.decoder, self._prompt_layout, params, self._join(before, rows), table, live)

    def _join(self, prompts: Sequence[OnePrompt | None], rows: int) -> Prefix:
        if rows == 1 and prompts[0] is not None:
            return prompts[0]
        joined = self.begin(rows)
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                joined = _join(self._prompt_layout, joined, np.int32(row), prompt)
        return joined

    def enter(
        self,
        prompts: Prefix,
        slots: Sequence[int],
        requests: Sequence[Request],
        ids: Sequence[np.ndarray],
    ) -> None:
        """Put prompts of these ids that were read into the rows `slots`; prompts behind these are padding."""
        count = len(prompts[1])
        asked = self.ask(_filled(requests, NOTHING, count), _filled(ids, NO_IDS, count))
        self._rows = _enter(self.part, self._layout, self._rows, _places(slots, count), prompts, asked)

    def read_into_rows(
        self,
        slots: Sequence[int],
        requests: Sequence[Request],
        ids: Sequence[np.ndarray],
        size: int,
        held: OnePrompt | None = None,
        start: int = 0,
    ) -> Array:
        """Read the ends of prompts, and put the prompts into rows of the lane, all by one program.

        Args:
          slots: rows of the lane, each once.
          requests: one for each slot.
          ids: those of each whole prompt.
          size: ids to which each end is padded.
          held: the state of a single prompt that was read in part; None if all begin.
          start: how many ids of that prompt were read.

        Returns an array to wait for, which no later call uses up.
        """
        given = self._lay_out(slots, requests, ids, size, held, start)
        self._rows, done = _read_into_rows(*self._static(size), self._narrow, self._rows, *given)
        return done

    def lower_reading(self, size: int) -> Any:
        """Return the lowered program of `read_into_rows`. Once it is compiled, calls use it."""
        given = self._lay_out([], [], [], size, None, 0)
        return _read_into_rows.lower(*self._static(size), self._narrow, self._rows, *given)

    def _static(self, size: int) -> tuple[Any, ...]:
        return self._apart, self._lane.capacity, self.count_prompts(size), self.part, self._layout

    def _lay_out(
        self,
        slots: Sequence[int],
        requests: Sequence[Request],
        ids: Sequence[np.ndarray],
        size: int,
        held: OnePrompt | None,
        start: int,
    ) -> tuple[Any, ...]:
        """Return the arrays of `read_into_rows`, padded to as many prompts as the lane has rows or a few more."""
        width = self.count_prompts(size)
        room = -(-self._lane.slots // width) * width
        table, lengths = np.full((room, size), PAD, np.int32), np.zeros(room, np.int32)
        for row, own in enumerate(ids):
            piece = own[start : self.count_to_read(len(own))]
            table[row, : len(piece)], lengths[row] = piece, len(piece)
        requests, ids = _filled(requests, NOTHING, room), _filled(ids, NO_IDS, room)
        *asked, codes = self.ask(requests, ids)
        given = (_places(slots, room), table, lengths, asked, codes)
        turns = np.int32(-(-len(slots) // width))
        return given, turns, *((self._blank, np.int32(NO_ROW)) if held is None else (held, np.int32(0)))

    def ask(self, requests: Sequence[Request], ids: Sequence[np.ndarray]) -> tuple[Any, ...]:
        """Return the arrays that `part` takes behind the prompts: what requests with these ids ask for."""
        # Name the layers of the unrolled model: blocks may have routers of their own
        chosen = choose_codes_of_rows(self._apart.model, [request.adapter for request in requests])
        return *ask_for(requests, ids), chosen

    @staticmethod
    def part(rows: Any, prompts: Prefix, *asked: Any) -> Any:
        """Return the rows that continue prompts that were read. `rows` are the lane's; `asked` is from `ask`."""
        return _part(rows, prompts, *asked)

    def decode(self, slots: Iterable[int]) -> Table:
        """Draw the next bytes of the rows in these slots, and end all others.

        Returns the draws as one table for `unpack_draws`, which is on its way to the host.
        """
        live = np.zeros(self._lane.slots, bool)
        live[list(slots)] = True
        if not np.array_equal(live, self._live[0]):
            self._live = live, _copied(live)
        table = self._draw(self._live[1])
        # Queue the copy behind the program: asked for later, it would wait for the host to come back
        table.copy_to_host_async()
        return table

    def _draw(self, live: Bool[Array, "S"]) -> Table:
        given = self._narrow, self._rows, live, self._spare
        self._rows, table = _decode(self._apart, self._layout, *given)
        if self._spare is None:
            return table
        # Hand out a copy, and write the next draws where these are: for a new address the host sets each kernel of the
        # graph anew, which takes longer than a round of one row
        self._spare = table
        return _copied(table)


_copied = jax.jit(jnp.copy)


def piece_sizes(decoder: Decoder, piece_bytes: int) -> tuple[int, ...]:
    """Return the lengths of the rows that pieces of prompts are read in, the piece's own last."""
    grid = decoder.build().grid
    most = max(1, piece_bytes // grid) * grid
    return (*(size for size in SHORT_PIECES if size < most), most)


def copy_prompt(prompts: Prefix, row: int = 0) -> OnePrompt:
    """Return one of the prompts that were read, to be used up elsewhere."""
    return _copy(prompts, np.int32(row))


@jax.jit
def _copy(prompts: Prefix, row: Int[Array, ""]) -> OnePrompt:
    return take_rows(prompts, row[None])


def ask_for(
    requests: Sequence[Request], ids: Sequence[np.ndarray]
) -> tuple[Requests, Float[np.ndarray, "N 2"]]:
    """Return requests behind these ids as rows of arrays, which only a compiled program brings to the device.

    An operation of JAX's own would wait for the device, and keep all other threads from running meanwhile.
    """
    samplings = [request.sampling for request in requests]
    asked = Requests(
        lengths=np.array([len(own) for own in ids], np.int32),
        limits=np.array([request.max_new_bytes for request in requests], np.int32),
        seeds=np.array([sampling.seed for sampling in samplings], np.uint32),
        indices=np.zeros(len(samplings), np.uint32),
        sampling=sampling_arrays([sampling.config for sampling in samplings]),
        alphabet=alphabet_table([sampling.alphabet for sampling in samplings]),
    )
    penalties = [(sampling.frequency_penalty, sampling.presence_penalty) for sampling in samplings]
    return asked, np.array(penalties, np.float32)


NOTHING = Request(b"")
"""What a row without a request asks for."""

NO_IDS = np.ones(1, np.int32)
"""The prompt of a row without a request."""


def _places(slots: Sequence[int], count: int) -> Int[np.ndarray, "N"]:
    """Return `slots`, padded to `count` row numbers."""
    return np.asarray([*slots, *range(NO_ROW, NO_ROW + count - len(slots))], np.int32)


def _filled[T](items: Sequence[T], item: T, count: int) -> list[T]:
    return [*items, *[item] * (count - len(items))]


def _find_anchor(params: dict[str, Any]) -> Array | None:
    """Return an array that is bound to its device, if the parameters are and there is one device.

    Programs that make rows take it, so that the rows are bound too. Otherwise the first program that takes both would
    return them bound, and its next call would be compiled anew.
    """
    first = jax.tree.leaves(params)[0]
    return first if getattr(first, "committed", False) and len(first.sharding.device_set) == 1 else None


@partial(jax.jit, static_argnums=0, keep_unused=True)
def _blank(rows: int, anchor: Array | None) -> Table:
    del anchor
    return blank_table(rows, STEPS)


@partial(jax.jit, static_argnums=(0, 1, 2), keep_unused=True)
def _begin(decoder: Decoder, lane: Lane, rows: int, anchor: Array | None) -> Prefix:
    del anchor
    return begin_prompts(decoder, rows, num_bytes=lane.capacity)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _join(layout: Layout, prompts: Prefix, row: Int[Array, ""], prompt: OnePrompt) -> Prefix:
    return keep_layout(put_rows(prompts, row[None], prompt), layout)


def empty_rows(decoder: Decoder, lane: Lane) -> LaneRows:
    """Return rows that are all done."""
    slots, width = lane.slots, decoder.model.vocab_size
    zeros = lambda dtype=jnp.int32: jnp.zeros((slots,), dtype)  # noqa: E731
    return LaneRows(
        state=unroll_state(init_decoder(decoder, slots, num_bytes=lane.capacity)),
        logits=jnp.zeros((slots, width), jnp.float32),
        done=jnp.ones((slots,), bool),
        drawn=zeros(),
        counts=jnp.zeros((slots, width), jnp.int32),
        requests=Requests(
            lengths=zeros(),
            limits=zeros(),
            seeds=zeros(jnp.uint32),
            indices=zeros(jnp.uint32),
            sampling=jax.tree.map(lambda x: jnp.tile(x, slots), sampling_arrays([NOTHING.sampling.config])),
            alphabet=jnp.ones((slots, VOCAB_SIZE), bool),
        ),
        penalties=jnp.zeros((slots, 2), jnp.float32),
        chosen=jax.tree.map(jnp.asarray, choose_codes_of_rows(unrolled(decoder).model, [None] * slots)),
        waiting=none_waiting(decoder, slots),
    )


@partial(jax.jit, static_argnums=(0, 1), keep_unused=True)
def _empty(decoder: Decoder, lane: Lane, anchor: Array | None = None) -> Packed:
    del anchor
    return pack_small(empty_rows(decoder, lane))


# Donate states: the caches of a long row would be there twice
@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _read(
    decoder: Decoder,
    layout: Layout,
    params: dict[str, Any],
    before: Prefix,
    ids: Int[Array, "N L"],
    live: Bool[Array, "N L"],
) -> tuple[Prefix, Bool[Array, "N"]]:
    prompt = keep_layout(read_piece(decoder, params, before, ids, live.astype(jnp.int32)), layout)
    return prompt, jnp.isfinite(prompt[1][:, 0])


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _enter(
    part: MakePart,
    layout: Layout,
    packed: Packed,
    slots: Int[Array, "N"],
    prompts: Prefix,
    asked: tuple[Any, ...],
) -> Packed:
    rows = packed.unpack()
    return keep_layout(pack_small(put_rows(rows, slots, part(rows, prompts, *asked))), layout)


def _part(
    rows: LaneRows, prompts: Prefix, asked: Requests, penalties: Float[Array, "N 2"], chosen: dict[str, Any]
) -> LaneRows:
    state, logits, sound = prompts
    return LaneRows(
        state=unroll_state(state),
        logits=jnp.where(sound[:, None], logits, jnp.nan),
        done=jnp.zeros(sound.shape, bool),
        drawn=jnp.zeros(sound.shape, jnp.int32),
        counts=jnp.zeros(logits.shape, jnp.int32),
        requests=asked,
        penalties=penalties,
        chosen=chosen,
        waiting=jax.tree.map(lambda x: jnp.zeros((len(sound), *x.shape[1:]), x.dtype), rows.waiting),
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=6, compiler_options=ONE_LOOP_IN_ONE_GRAPH)
def _read_into_rows(
    decoder: Decoder,
    capacity: int,
    width: int,
    part: MakePart,
    layout: Layout,
    params: dict[str, Any],
    packed: Packed,
    given: tuple[Any, ...],
    turns: Int[Array, ""],
    held: OnePrompt,
    to: Int[Array, ""],
) -> tuple[Packed, Int[Array, ""]]:
    """Read `width` prompts in each turn, and put them into their rows. `held` enters each turn at prompt `to`.

    The decoder is of `unrolled`: copies by a layer's number would keep the loop out of the graph.
    """
    state, logits, sound = held
    held = unroll_state(state), logits, sound

    def turn(carry: tuple[Array, Packed]) -> tuple[Array, Packed]:
        done, packed = carry
        mine = done * width + jnp.arange(width, dtype=jnp.int32)
        # Gather: a slice by an offset that only the host knows would keep the loop out of the graph too
        slots, ids, lengths, asked, codes = jax.tree.map(lambda x: jnp.asarray(x)[mine], given)
        live = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        begun = put_rows(begin_prompts(decoder, width, num_bytes=capacity), to[None], held)
        prompts = read_piece(decoder, {**params, CHOSEN: codes}, begun, ids, live.astype(jnp.int32))
        rows = packed.unpack()
        entered = put_rows(rows, slots, part(rows, prompts, *asked, codes))
        return done + 1, keep_layout(pack_small(entered), layout)

    done, packed = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, (jnp.zeros_like(turns), packed))
    return packed, done


@partial(
    jax.jit, static_argnums=(0, 1), donate_argnums=(3, 5), keep_unused=True, compiler_options=IN_ONE_GRAPH
)
def _decode(
    decoder: Decoder,
    layout: Layout,
    params: dict[str, Any],
    packed: Packed,
    live: Bool[Array, "S"],
    spare: Table | None,
) -> tuple[Packed, Table]:
    """Take `STEPS` steps of the rows that are live; the key of a byte comes from seed and position alone.

    The table takes the memory of `spare`.
    """
    del spare
    rows: LaneRows = packed.unpack()
    rows, asked = rows.replace(done=rows.done | ~live), rows.requests  # pyright: ignore[reportAttributeAccessIssue]
    params, none, begun = {**params, CHOSEN: rows.chosen}, jnp.zeros(live.shape, jnp.int32), rows.drawn
    places = (asked.lengths + begun)[None] + jnp.arange(STEPS, dtype=jnp.int32)[:, None]
    keys = jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(request_keys(asked), places)
    noise = draw_noise(keys, rows.logits.shape[-1])
    every = jnp.arange(len(live), dtype=jnp.int32)

    def body(packed: Packed, _: None) -> tuple[Packed, tuple[Array, ...]]:
        rows: LaneRows = packed.unpack()
        penalty, here = penalties_of(rows.counts, rows.penalties), noise[rows.drawn - begun, every]
        ids = sample_by(asked.sampling, here, rows.logits - penalty, alphabet=asked.alphabet)
        draws = _draws(rows)
        ended = rows.done | (draws & (ids == EOS))
        done = ended | (draws & (rows.drawn + 1 >= asked.limits))
        logits, closed, state, waiting = _step(decoder, params, ids, rows, done)
        chosen = jax.nn.one_hot(ids, rows.counts.shape[-1], dtype=jnp.int32)
        moved = rows.replace(  # pyright: ignore[reportAttributeAccessIssue]
            state=state,
            logits=logits,
            done=done,
            drawn=rows.drawn + draws.astype(jnp.int32),
            counts=rows.counts + jnp.where(draws[:, None], chosen, 0),
            waiting=waiting,
        )
        # Tell in two arrays: each is a kernel
        told = [x.astype(jnp.int32) for x in (ids, rows.done, ended, closed, draws)]
        # Choose between logits and zeros: a copy into a place of the loop's count would keep the loop out of the graph
        said = jnp.where(rows.done[:, None], 0.0, rows.logits)
        return pack_small(moved), (said, jnp.stack(told, -1))

    packed, found = jax.lax.scan(body, pack_small(rows), length=STEPS)
    # Tell of all steps at once: inside the loop, small kernels would run for each byte
    logits, told = (jnp.moveaxis(x, 0, 1) for x in found)
    at_last = told[:, -1, 2] != 0
    if rows.waiting is not None:
        # Put steps without a draw behind the others
        order = jnp.argsort(told[..., 4] == 0, axis=1, stable=True)[..., None]
        logits, told = (jnp.take_along_axis(x, order, 1) for x in (logits, told))
    ids, (were_done, ended, closed, draws) = told[..., 0], jnp.moveaxis(told[..., 1:] != 0, -1, 0)
    finite = jnp.all(jnp.isfinite(logits), -1) | were_done | ~draws
    kept = draws & ~ended
    drawn = Drawn(ids, kept, finite, closed, *predictions(logits, ids), at_last, none, none)
    return keep_layout(packed, layout), pack_draws(drawn)


def _draws(rows: LaneRows) -> Bool[Array, "S"]:
    """Return which rows draw a byte now: all that do not stand still."""
    return jnp.ones_like(rows.done) if rows.waiting is None else ~rows.waiting.rows


def _step(
    decoder: Decoder, params: dict[str, Any], ids: Int[Array, "S"], rows: LaneRows, done: Bool[Array, "S"]
) -> tuple[Float[Array, "S V"], Bool[Array, "S"], DecoderState, Waiting | None]:
    """Read a byte of each row that is not done, or let it stand still."""
    segment_ids = jnp.where(done, 0, 1)
    if rows.waiting is None:
        return *decode_step(decoder, params, ids, rows.state, segment_ids), None
    return step_or_wait(decoder, params, ids, rows.state, segment_ids, rows.waiting.only(~done))


def penalties_of(counts: Int[Array, "... V"], penalties: Float[Array, "... 2"]) -> Float[Array, "... V"]:
    """Return what is subtracted from logits, by how often each id was drawn."""
    often, once = penalties[..., :1], penalties[..., 1:]
    return often * counts.astype(jnp.float32) + jnp.where(counts > 0, once, 0.0)
