"""Generation with drafted bytes: the same bytes as without them, in fewer calls of the model.

A row is read in windows of `WINDOW` bytes. The state stands at the edge of a window. Each call reads the whole window
from there: the bytes that are known, and drafts behind them.

    state |  known         drafts        rest          one call: logits behind each
          |  T h e _ c     a t _ m       . . . .
    draws              a   t _ s                       what each byte's own key draws: "at_s"; the draft "m" was wrong

The logits behind a byte know no bit of later ones, and the place of a byte in its window never changes. So a draw is
the same whatever is drafted behind it. Once all bytes of a window are known, the state takes them in one more call.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.fallback import count_replaced
from jaxblt.data.vocab import EOS, PAD, decode
from jaxblt.inference.decode import Decoder, DecoderState, decode_and_cut_bytes, decode_bytes
from jaxblt.inference.drafts import MOST_DRAFTED, DraftArrays, DraftCounts, Drafts, draft
from jaxblt.inference.in_place import advancing
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import prefill
from jaxblt.inference.reports import refuse_nonfinite, warn_of_rows
from jaxblt.inference.requests import Requests, bucket, request_keys
from jaxblt.inference.sampling import sample
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.models.change import change_if
from jaxblt.show import show

WINDOW = 32
"""Bytes of a window; fewer where they do not divide a model's blocks."""

ROUNDS = 8
"""Calls of the model in one call of a compiled program, before the host looks whether all rows have ended."""

DRAWN = MOST_DRAFTED + 1
"""Bytes that a round draws of a row: a draft, and the byte behind it."""


class DraftedPlace(flax.struct.PyTreeNode):
    """The place of each row.

    Attributes:
      state: behind the first `base` ids.
      base: the edge of the row's window.
      history: its ids, filled up with PAD.
      length: ids that are known.
      done: whether the row has ended.
    """

    state: DecoderState
    base: Int[Array, "B"]
    history: Int[Array, "B L"]
    length: Int[Array, "B"]
    done: Bool[Array, "B"]

    __repr__ = show

    def window(self, width: int) -> Int[Array, "B W"]:
        """Return the ids behind `base`."""
        index = self.base[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        return jnp.take_along_axis(self.history, index, 1)


class Round(NamedTuple):
    """The draws of a call or of several, whether each belongs to its row, and whether its logits were finite."""

    drawn: Int[Array, "*R B N"]
    kept: Bool[Array, "*R B N"]
    finite: Bool[Array, "*R B N"]


class Told(NamedTuple):
    """The counts of a piece.

    Attributes:
      rounds: that it took.
      drafted, accepted: bytes of each row.
      refused: patch boundaries refused and asked for, in all that the last round read; None without patches.
      replaced: tokens of each row whose code was not finite, likewise; None without a router.
    """

    rounds: Int[Array, ""]
    drafted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    refused: tuple[Array, Array] | None
    replaced: Int[Array, "B"] | None

    def behind(self, later: "Told") -> "Told":
        """Return the counts of both, where `later` is of the rounds behind these."""
        sums = (self.rounds + later.rounds, self.drafted + later.drafted, self.accepted + later.accepted)
        return Told(*sums, later.refused, later.replaced)


def drafted_pieces(
    decoder: Decoder,
    params: dict[str, Any],
    table: Int[Array, "B L"],
    requests: Requests,
    drafts: Drafts,
    report: Callable[[DraftCounts], None] | None,
) -> Iterator[list[bytes]]:
    """Yield the next bytes of each row, piece after piece, until all rows have ended; then report."""
    num_bytes = table.shape[1] + bucket(int(np.max(requests.limits)))
    prepared = prepare_decoding(decoder, params, rows=len(table), num_bytes=num_bytes)
    place = _begin(decoder, num_bytes, prepared, table, requests.lengths)
    apart = unrolled(decoder)
    prepared = narrow_params(apart, len(table), unroll_params(prepared), place.state)
    go_on = partial(advancing(_advance, place), apart, ROUNDS, prepared, requests)
    calls, drawn, drafted, accepted = 0, *(np.zeros(len(table), int) for _ in range(3))
    while True:
        place, found = go_on(place, drafts.arrays)
        (rounds, told), done = jax.device_get((found, place.done))
        _check_finite(rounds, drawn, np.asarray(requests.lengths), params)
        yield [decode(rounds.drawn[:, row][rounds.kept[:, row]]) for row in range(len(table))]
        calls, drawn = calls + int(told.rounds), drawn + rounds.kept.sum((0, 2))
        drafted, accepted = drafted + told.drafted, accepted + told.accepted
        if done.all():
            break
    if _has_to_warn(told):
        # Read the rows that have ended once more, without drafts: those of the last call are in its counts
        told = jax.device_get(go_on(place, drafts.arrays)[1][1])
        warn_of_rows(decoder, params, told.refused, told.replaced)
    if report is not None:
        report(DraftCounts(calls, *(tuple(x.tolist()) for x in (drawn, drafted, accepted))))


def _has_to_warn(told: Told) -> bool:
    """Return whether boundaries were refused or codes replaced; drafts only add to both counts."""
    refused = told.refused is not None and told.refused[0] > 0
    return bool(refused or (told.replaced is not None and np.any(told.replaced)))


def _check_finite(rounds: Round, drawn: np.ndarray, lengths: np.ndarray, params: dict[str, Any]) -> None:
    """Raise for the first prompt with logits that are not finite; `drawn` bytes came before these rounds."""
    bad = ~rounds.finite
    if bad.any():
        prompt = int(np.argmax(bad.any((0, 2))))
        first = int(np.argmax(bad[:, prompt].reshape(-1)))
        byte = drawn[prompt] + int(rounds.kept[:, prompt].reshape(-1)[:first].sum())
        refuse_nonfinite(prompt, byte, lengths[prompt], params)


def window_bytes(decoder: Decoder) -> int:
    """Return the bytes of a window, which divide a block."""
    grid = decoder.build().grid
    return WINDOW if grid == 1 else math.gcd(WINDOW, grid)


@partial(jax.jit, static_argnums=(0, 1))
def _begin(
    decoder: Decoder,
    num_bytes: int,
    params: dict[str, Any],
    prompts: Int[Array, "B L"],
    lengths: Int[Array, "B"],
) -> DraftedPlace:
    """Read the prompts up to the last edge before their ends: the next call reads at least one byte."""
    width = window_bytes(decoder)
    base = (lengths - 1) // width * width
    segments = (jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < base[:, None]).astype(jnp.int32)
    _, state = prefill(decoder, params, prompts, segments, num_bytes=num_bytes)
    # Leave room for a window that begins before the last byte, and for the byte behind it
    room = num_bytes + width + 1 - prompts.shape[1]
    history = jnp.pad(prompts, ((0, 0), (0, room)), constant_values=PAD)
    return DraftedPlace(unroll_state(state), base, history, lengths, jnp.zeros(lengths.shape, bool))


def _advance(
    decoder: Decoder,
    rounds: int,
    params: dict[str, Any],
    requests: Requests,
    place: DraftedPlace,
    settings: DraftArrays,
) -> tuple[DraftedPlace, tuple[Round, Told]]:
    """Take up to `rounds` rounds, at least one, until all rows have ended."""
    keys, rows = request_keys(requests), len(place.length)

    def body(carry: tuple[DraftedPlace, Round, Told]) -> tuple[DraftedPlace, Round, Told]:
        place, found, told = carry
        place = take_windows(decoder, params, place)
        place, here, now = _draw(decoder, params, requests, keys, place, settings)
        found = jax.tree.map(lambda all, one: all.at[told.rounds].set(one), found, here)
        return place, found, told.behind(now)

    def goes_on(carry: tuple[DraftedPlace, Round, Told]) -> Bool[Array, ""]:
        place, _, told = carry
        return (told.rounds == 0) | ((told.rounds < rounds) & ~jnp.all(place.done))

    drawn = jnp.zeros((rounds, rows, DRAWN), jnp.int32)
    nothing = Round(drawn, drawn > 0, drawn == 0)
    none = jnp.zeros(rows, jnp.int32)
    told = Told(jnp.zeros((), jnp.int32), none, none, *_counted(decoder, place.state))
    place, found, told = jax.lax.while_loop(goes_on, body, (place, nothing, told))
    return place, (found, told)


def take_windows(decoder: Decoder, params: dict[str, Any], place: DraftedPlace) -> DraftedPlace:
    """Move the state of rows whose windows are known and that go on."""
    width = window_bytes(decoder)
    full = (place.length - place.base > width) & ~place.done
    segments = jnp.broadcast_to(full[:, None], (len(full), width)).astype(jnp.int32)

    def take(state: DecoderState) -> DecoderState:
        return decode_bytes(decoder, params, place.window(width), state, segments)[1]

    state = change_if(jnp.any(full), take, place.state)
    return place.replace(state=state, base=place.base + jnp.where(full, width, 0))


def _draw(
    decoder: Decoder,
    params: dict[str, Any],
    requests: Requests,
    keys: Any,
    place: DraftedPlace,
    settings: DraftArrays,
) -> tuple[DraftedPlace, Round, Told]:
    """Draft, read the window, and draw behind the known bytes for as long as the drafts are right."""
    left = jnp.asarray(requests.lengths + requests.limits) - place.length
    seen = look(decoder, params, place, left, settings)
    index = jnp.arange(DRAWN, dtype=jnp.int32)[None]
    drawn = sample_behind(requests, keys, place.length[:, None] + index, seen.logits)
    after, mine = accept(place, left, seen, drawn)
    finite = jnp.all(jnp.isfinite(seen.logits), -1) | ~mine
    told = Told(jnp.ones((), jnp.int32), seen.meant, count_accepted(mine), *_counted(decoder, seen.state))
    return after, Round(drawn, mine & (drawn != EOS), finite), told


class Seen(NamedTuple):
    """The window of each row, read with a draft behind its known bytes.

    Attributes:
      guess, meant: the draft, and how many ids of it were read.
      logits: behind the last known byte and behind each of the draft.
      closed: whether a patch ended with each of these bytes.
      state: behind all that was read, right or wrong.
    """

    guess: Int[Array, "B N"]
    meant: Int[Array, "B"]
    logits: Float[Array, "B M V"]
    closed: Bool[Array, "B M"]
    state: DecoderState


def look(
    decoder: Decoder,
    params: dict[str, Any],
    place: DraftedPlace,
    left: Int[Array, "B"],
    settings: DraftArrays,
) -> Seen:
    """Draft what may follow and read the window, for rows that may draw `left` more bytes."""
    width, index = window_bytes(decoder), jnp.arange(DRAWN, dtype=jnp.int32)[None]
    known = place.length - place.base
    guess, meant = draft(settings, place.history, place.length)
    meant = jnp.where(place.done, 0, jnp.minimum(meant, jnp.minimum(width - known, left - 1)))
    # Leave the last byte of a row that has ended out, which nothing follows
    count = known + jnp.where(place.done, -1, meant)
    at = jnp.arange(width, dtype=jnp.int32)[None]
    own = jnp.take_along_axis(guess, jnp.clip(at - known[:, None], 0, MOST_DRAFTED - 1), 1)
    ids = jnp.where(at < known[:, None], place.window(width), own)
    segments = (at < count[:, None]).astype(jnp.int32)
    logits, closed, state = decode_and_cut_bytes(decoder, params, ids, place.state, segments)
    behind = jnp.clip(known[:, None] - 1 + index, 0, width - 1)
    logits = jnp.take_along_axis(logits, behind[..., None], 1)
    return Seen(guess, meant, logits, jnp.take_along_axis(closed, behind, 1), state)


def accept(
    place: DraftedPlace, left: Int[Array, "B"], seen: Seen, drawn: Int[Array, "B M"]
) -> tuple[DraftedPlace, Bool[Array, "B M"]]:
    """Add the draws behind the known bytes for as long as the drafts are right; return which of them were added."""
    index = jnp.arange(DRAWN, dtype=jnp.int32)[None]
    right = (drawn[:, :-1] == seen.guess) & (index[:, :-1] < seen.meant[:, None])
    accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), 1), 1, dtype=jnp.int32)
    taken = jnp.where(place.done, 0, accepted + 1)
    mine = index < taken[:, None]
    rows = jnp.arange(len(taken), dtype=jnp.int32)[:, None]
    to = jnp.where(mine, place.length[:, None] + index, place.history.shape[1])
    after = place.replace(
        history=place.history.at[rows, to].set(drawn, mode="drop"),
        length=place.length + taken,
        done=place.done | jnp.any((drawn == EOS) & mine, 1) | (taken >= left),
    )
    return after, mine


def count_accepted(mine: Bool[Array, "B M"]) -> Int[Array, "B"]:
    """Return how many drafts of each row were right, by which draws were added."""
    return jnp.maximum(jnp.sum(mine, 1, dtype=jnp.int32) - 1, 0)


def sample_behind(
    requests: Requests, keys: Any, positions: Int[Array, "B N"], logits: Any
) -> Int[Array, "B N"]:
    """Draw every byte by its own key, as one row each."""
    count = positions.shape[1]
    own = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions).reshape(-1)
    sampling, alphabet = jax.tree.map(
        lambda x: jnp.repeat(x, count, 0), (requests.sampling, requests.alphabet)
    )
    flat = logits.reshape(-1, logits.shape[-1])
    return sample(sampling, own, flat, alphabet=alphabet).reshape(positions.shape)


def _counted(decoder: Decoder, state: DecoderState) -> tuple[Any, Any]:
    """Return `refused` and `replaced` of all that a state has read."""
    count = partial(jnp.sum, dtype=jnp.int32)
    return jax.tree.map(count, decoder.build().boundaries(state.model)), count_replaced(state.model)
