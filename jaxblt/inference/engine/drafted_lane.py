"""A lane whose rows guess bytes and check several in one call of the model: `jaxblt.inference.drafted`, by rows.

A byte's patch may end with it, which is known once the model reads it. So the last byte of a round waits for the next
round, unless its request has ended.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import EOS, PAD
from jaxblt.inference.decode import Decoder, DecoderState
from jaxblt.inference.drafted import (
    DRAWN,
    DraftedPlace,
    Seen,
    accept,
    count_accepted,
    look,
    sample_behind,
    take_windows,
    window_bytes,
)
from jaxblt.inference.drafts import DraftArrays, Drafts
from jaxblt.inference.engine.config import TOP, Lane, Request
from jaxblt.inference.engine.draws import Drawn, Table, pack_draws, predictions
from jaxblt.inference.engine.programs import LanePrograms, empty_rows, penalties_of
from jaxblt.inference.in_place import Layout, keep_layout
from jaxblt.inference.prompts import Prefix
from jaxblt.inference.requests import Requests, request_keys
from jaxblt.inference.unroll import unroll_state
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.packed import Packed, pack_small
from jaxblt.show import show

CALLS = 4
"""Calls of the model in a round."""

COLUMNS = CALLS * DRAWN + 1
"""Bytes of a row that a round hands out at the most."""


class Guessed(NamedTuple):
    """Draws, whether their logits were finite, and what the model predicted there, as in `Drawn`."""

    ids: Int[Array, "S T"]
    finite: Bool[Array, "S T"]
    entropies: Float[Array, "S T"]
    logprobs: Float[Array, "S T"]
    top_ids: Int[Array, "S T K"]
    top_logprobs: Float[Array, "S T K"]


@flax.struct.dataclass
class DraftedRows:
    """The rows of a lane that drafts.

    Attributes:
      place: of each row, see `DraftedPlace`.
      sound: whether all entropies of the prompt were finite.
      held: 1 where the last draw is not handed out yet, else 0.
      last: that draw.
      counts, requests, penalties, chosen: as of `LaneRows`.
    """

    place: DraftedPlace
    sound: Bool[Array, "S"]
    held: Int[Array, "S"]
    last: Guessed
    counts: Int[Array, "S V"]
    requests: Requests
    penalties: Float[Array, "S 2"]
    chosen: dict[str, Any]

    __repr__ = show

    @property
    def state(self) -> DecoderState:
        """The state of all rows."""
        return self.place.state


class DraftedLane(LanePrograms):
    """A lane on the device that drafts. How many bytes a round draws is not known before it is read."""

    def __init__(
        self, decoder: Decoder, params: dict[str, Any], lane: Lane, piece_bytes: int, drafts: Drafts
    ) -> None:
        """Prepare parameters and empty rows; `drafts` is a value to its program."""
        self._drafts, self._width = drafts.arrays, window_bytes(decoder)
        super().__init__(decoder, params, lane, piece_bytes)

    @property
    def draws(self) -> tuple[int, int]:
        """The least and the most bytes of a round: none, as the one that is drawn may wait for the next round."""
        return 0, COLUMNS

    def make_rows(self) -> Packed:
        """Return rows that are all done."""
        return _empty(self.decoder, self._lane, self._anchor)

    def _make_spare(self) -> None:
        """Return None: a drafted round makes a new table, so it needs no spare one."""

    def count_to_read(self, length: int) -> int:
        """Return how many ids of a prompt stand before the window in which its last one lies."""
        return (length - 1) // self._width * self._width

    def ask(self, requests: Sequence[Request], ids: Sequence[np.ndarray]) -> tuple[Any, ...]:
        """Return the arrays that `part` takes behind the prompts: what requests with these ids ask for."""
        history = np.full((len(ids), _room(self._lane, self._width)), PAD, np.int32)
        for row, own in zip(history, ids, strict=True):
            row[: len(own)] = own
        base = np.array([self.count_to_read(len(own)) for own in ids], np.int32)
        return history, base, *super().ask(requests, ids)

    @staticmethod
    def part(rows: Any, prompts: Prefix, *asked: Any) -> Any:
        """Return the rows that continue prompts that were read. `rows` are the lane's; `asked` is from `ask`."""
        del rows
        return _part(prompts, *asked)

    def _draw(self, live: Bool[Array, "S"]) -> Table:
        given = (self._narrow, self._rows, live, self._drafts)
        self._rows, table = _decode(self._apart, self._layout, *given)
        return table


def _room(lane: Lane, width: int) -> int:
    """Return ids of a row's history, with room for a window that begins before its last byte."""
    return lane.capacity + width + 1


@partial(jax.jit, static_argnums=(0, 1), keep_unused=True)
def _empty(decoder: Decoder, lane: Lane, anchor: Array | None) -> Packed:
    del anchor
    rows = empty_rows(decoder, lane)
    zeros = jnp.zeros((lane.slots,), jnp.int32)
    history = jnp.full((lane.slots, _room(lane, window_bytes(decoder))), PAD, jnp.int32)
    # Give a row without a request one id: its window is looked at too
    place = DraftedPlace(rows.state, zeros, history, zeros + 1, rows.done)
    drafted = DraftedRows(
        place=place,
        sound=~rows.done,
        held=zeros,
        last=_nothing(lane.slots, 1),
        counts=rows.counts,
        requests=rows.requests,
        penalties=rows.penalties,
        chosen=rows.chosen,
    )
    return pack_small(drafted)


def _nothing(rows: int, columns: int) -> Guessed:
    """Return draws that say nothing."""
    zeros = jnp.zeros((rows, columns), jnp.int32)
    tops = jnp.zeros((rows, columns, TOP), jnp.int32)
    number = lambda x: x.astype(jnp.float32)  # noqa: E731
    return Guessed(zeros, zeros == 0, number(zeros), number(zeros), tops, number(tops))


def _part(
    prompts: Prefix,
    history: Int[Array, "N L"],
    base: Int[Array, "N"],
    asked: Requests,
    penalties: Float[Array, "N 2"],
    chosen: dict[str, Any],
) -> DraftedRows:
    (state, logits, sound), lengths = prompts, jnp.asarray(asked.lengths)
    return DraftedRows(
        place=DraftedPlace(unroll_state(state), base, history, lengths, jnp.zeros(sound.shape, bool)),
        sound=sound,
        held=jnp.zeros(sound.shape, jnp.int32),
        last=_nothing(len(sound), 1),
        counts=jnp.zeros(logits.shape, jnp.int32),
        requests=asked,
        penalties=penalties,
        chosen=chosen,
    )


class _Round(NamedTuple):
    """The draws of a round so far, by columns that begin with the one that was held."""

    table: Guessed
    closed: Bool[Array, "S T"]
    drafted: Int[Array, "S"]
    accepted: Int[Array, "S"]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    decoder: Decoder,
    layout: Layout,
    params: dict[str, Any],
    packed: Packed,
    live: Bool[Array, "S"],
    settings: DraftArrays,
) -> tuple[Packed, Table]:
    """Call the model `CALLS` times for the rows that are live."""
    rows: DraftedRows = packed.unpack()
    done = rows.place.done | ~live
    rows = rows.replace(place=rows.place.replace(done=done))  # pyright: ignore[reportAttributeAccessIssue]
    params = {**params, CHOSEN: rows.chosen}
    begun = rows.place.length - jnp.where(done, 0, rows.held)
    table = jax.tree.map(lambda x, one: x.at[:, :1].set(one), _nothing(len(live), COLUMNS), rows.last)
    none = jnp.zeros(live.shape, jnp.int32)

    def body(carry: tuple[DraftedRows, _Round], _: None) -> tuple[tuple[DraftedRows, _Round], None]:
        return _call(decoder, params, settings, begun, *carry), None

    start = (rows, _Round(table, jnp.zeros((len(live), COLUMNS), bool), none, none))
    (rows, found), _ = jax.lax.scan(body, start, length=CALLS)
    rows, drawn = _hand_out(rows, found, begun, done)
    return keep_layout(pack_small(rows), layout), pack_draws(drawn)


def _call(
    decoder: Decoder,
    params: dict[str, Any],
    settings: DraftArrays,
    begun: Int[Array, "S"],
    rows: DraftedRows,
    found: _Round,
) -> tuple[DraftedRows, _Round]:
    """Call the model once; the byte at place `begun` of a row has column 0."""
    place, asked = take_windows(decoder, params, rows.place), rows.requests
    left = jnp.asarray(asked.lengths + asked.limits) - place.length
    seen = look(decoder, params, place, left, settings)
    raw = jnp.where(rows.sound[:, None, None], seen.logits, jnp.nan)
    at = place.length[:, None] + jnp.arange(DRAWN, dtype=jnp.int32)[None]
    ids = sample_behind(asked, request_keys(asked), at, raw - _penalties(rows, seen))
    after, mine = accept(place, left, seen, ids)
    drawn = Guessed(ids, jnp.all(jnp.isfinite(raw), -1), *predictions(raw, ids))
    to = jnp.where(mine, at - begun[:, None], COLUMNS)
    row = jnp.arange(len(to), dtype=jnp.int32)[:, None]
    table = jax.tree.map(lambda x, new: x.at[row, to].set(new, mode="drop"), found.table, drawn)
    # The bytes that were read stand one place before those that were drawn; -1 would be the last column
    before = jnp.where(mine & (to > 0), to - 1, COLUMNS)
    closed = found.closed.at[row, before].set(seen.closed, mode="drop")
    told = _Round(table, closed, found.drafted + seen.meant, found.accepted + count_accepted(mine))
    counts = rows.counts + jnp.sum(jnp.where(mine[..., None], _one_hot(rows, ids), 0), 1, dtype=jnp.int32)
    return rows.replace(place=after, counts=counts), told  # pyright: ignore[reportAttributeAccessIssue]


def _penalties(rows: DraftedRows, seen: Seen) -> Float[Array, "S M V"]:
    """Return what is subtracted from the logits behind each id of a draft, if all before it are right."""
    before = jnp.pad(_one_hot(rows, seen.guess), ((0, 0), (1, 0), (0, 0)))
    return penalties_of(rows.counts[:, None] + jnp.cumsum(before, 1), rows.penalties[:, None])


def _one_hot(rows: DraftedRows, ids: Int[Array, "S T"]) -> Int[Array, "S T V"]:
    return jax.nn.one_hot(ids, rows.counts.shape[-1], dtype=jnp.int32)


def _hand_out(
    rows: DraftedRows, found: _Round, begun: Int[Array, "S"], was_done: Bool[Array, "S"]
) -> tuple[DraftedRows, Drawn]:
    """Return the draws of a round without the last one of rows that go on."""
    count, done = rows.place.length - begun, rows.place.done
    last = jax.tree.map(lambda x: _column(x, jnp.maximum(count - 1, 0)), found.table)
    ended = (last.ids[:, 0] == EOS) & ~was_done
    held = jnp.where(done, 0, 1)
    kept = jnp.arange(COLUMNS, dtype=jnp.int32)[None] < (count - jnp.where(ended, 1, held))[:, None]
    drawn = Drawn(
        **found.table._asdict(),
        kept=kept & ~was_done[:, None],
        closed=found.closed,
        ended=ended,
        drafted=found.drafted,
        accepted=found.accepted,
    )
    return rows.replace(held=held, last=last), drawn  # pyright: ignore[reportAttributeAccessIssue]


def _column(table: Array, at: Int[Array, "S"]) -> Array:
    """Return the column of each row, as a table of one."""
    return jnp.take_along_axis(table, at.reshape(-1, *(1,) * (table.ndim - 1)), 1)
