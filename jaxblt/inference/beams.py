"""Beam search: the most probable continuations of a prompt that a few rows side by side find."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import BOE, BOS, EOS, PAD, VOCAB_SIZE, decode
from jaxblt.inference.decode import Decoder, DecoderState, decode_step
from jaxblt.inference.generate import PIECE
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import prefill
from jaxblt.inference.requests import bucket, lay_out
from jaxblt.inference.rows import take_rows
from jaxblt.inference.sampling import SamplingConfig
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.models.finite import explain_nonfinite
from jaxblt.validation import number, whole

BEAMS = 4
"""Rows of a search by default."""
MOST_BEAMS = 256
"""Rows of a search at the most."""
MOST_EXPONENT = 10
"""Of lengths: powers of long ones are infinite beyond."""


@dataclass(frozen=True)
class Beam:
    """A continuation.

    Attributes:
      data: its bytes.
      log_likelihood: nats, of its bytes and of the EOS behind them, if it ends with one.
      ended: it ends with EOS; otherwise it has as many bytes as were asked for.
    """

    data: bytes
    log_likelihood: float
    ended: bool


@flax.struct.dataclass
class Place:
    """The place of each beam: state, logits of its next byte, sum of log p, its ids so far, and how many."""

    state: DecoderState
    logits: Float[Array, "K V"]
    nats: Float[Array, "K"]
    ids: Int[Array, "K N"]
    count: Int[Array, "K"]
    done: Bool[Array, "K"]


class Bounds(NamedTuple):
    """The limits of a search, as arrays: the ids that it may write, its bytes, and its beams, at most its rows."""

    allowed: Bool[Array | np.ndarray, "V"]
    limit: Int[Array | np.int32, ""]
    beams: Int[Array | np.int32, ""]


def beam_search(
    decoder: Decoder,
    params: dict[str, Any],
    prompt: bytes,
    *,
    max_new_bytes: int,
    beams: int = BEAMS,
    alphabet: bytes | None = None,
    length_exponent: float = 0.0,
    check: Callable[[], None] | None = None,
) -> list[Beam]:
    """Return the continuations of a prompt that a beam search finds, the best first.

    At each byte the `beams` most probable continuations stay, of all that are one byte longer; those that have ended
    compete with them. One beam is greedy decoding.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      prompt: may be empty; a BOS comes before it.
      max_new_bytes: bytes of a continuation at the most.
      beams: rows, 1 to 256.
      alphabet: bytes that may be written, such as b"ACGT"; EOS may besides. None for all.
      length_exponent: results are ordered by log-likelihood over (bytes and EOS) to this power, at most 10. With 0 the
        most probable is first, with 1 the most probable byte for byte.
      check: called before each 32 bytes; an error that it raises ends the search.

    Raises:
      ValueError: an option is out of range, or logits are not finite.
    """
    check_search(beams, length_exponent)
    table, requests = lay_out([prompt], max_new_bytes, SamplingConfig(), 0, alphabet)
    params, num_bytes = nn.meta.unbox(params), table.shape[1] + bucket(max_new_bytes)
    prepared = prepare_decoding(decoder, params, rows=beams, num_bytes=num_bytes)
    place = _begin(decoder, num_bytes, beams, prepared, table, requests.lengths)
    bounds = Bounds(requests.alphabet[0], np.int32(max_new_bytes), np.int32(beams))
    return go_on(decoder, prepared, place, bounds, len(prompt), length_exponent, check)


def check_search(beams: int, length_exponent: float) -> None:
    """Raise ValueError for an option of a search that is out of range."""
    whole("beams", beams, least=1, most=MOST_BEAMS)
    number("length_exponent", length_exponent, least=0, most=MOST_EXPONENT)


def go_on(
    decoder: Decoder,
    params: dict[str, Any],
    place: Place,
    bounds: Bounds,
    length: int,
    length_exponent: float = 0.0,
    check: Callable[[], None] | None = None,
) -> list[Beam]:
    """Search from a place behind a prompt to the end, and return the beams in order; `place` is used up.

    Args:
      decoder: models and patcher.
      params: of `prepare_decoding`.
      place: of `begin_beams`.
      bounds: of this search.
      length: of the prompt in bytes.
      length_exponent, check: as of `beam_search`.

    Raises:
      ValueError: logits are not finite.
    """
    apart = unrolled(decoder)
    narrow = narrow_params(apart, len(place.nats), unroll_params(params), place.state)
    for _ in range(0, int(bounds.limit), PIECE):
        if check is not None:
            check()
        place, finite = _advance(apart, narrow, bounds, place)
        if not finite:
            raise ValueError(
                f"logits are not finite behind a prompt of {length} bytes; {explain_nonfinite(params)}"
            )
        if np.asarray(place.done).all():
            break
    return _rank(place, length_exponent)


def _rank(place: Place, exponent: float) -> list[Beam]:
    nats, ids, count = (np.asarray(x) for x in (place.nats, place.ids, place.count))
    order = np.argsort(-nats / np.maximum(count, 1) ** exponent, kind="stable")
    found = []
    for row in order[np.isfinite(nats[order])]:
        text = ids[row, : count[row]]
        ended = bool(count[row]) and text[-1] == EOS
        found.append(Beam(decode(text[:-1] if ended else text), float(nats[row]), bool(ended)))
    return found


@partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(
    decoder: Decoder,
    num_bytes: int,
    beams: int,
    params: dict[str, Any],
    prompt: Int[Array, "1 L"],
    lengths: Int[Array, "1"],
) -> Place:
    segments = (jnp.arange(prompt.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.int32)
    logits, state = prefill(decoder, params, prompt, segments, num_bytes=num_bytes)
    return begin_beams(state, logits, rows=beams, most=num_bytes - prompt.shape[1])


def begin_beams(state: DecoderState, logits: Float[Array, "1 V"], *, rows: int, most: int) -> Place:
    """Return the place of a search behind a prompt that was read in one row, with room for `most` new ids."""
    zeros = jnp.zeros((rows,), jnp.int32)
    # Begin with one beam: equal ones would find the same continuations
    nats = jnp.where(jnp.arange(rows, dtype=jnp.int32) == 0, 0.0, -jnp.inf)
    ids = jnp.full((rows, most), PAD, jnp.int32)
    return Place(unroll_state(take_rows(state, zeros)), logits[zeros], nats, ids, zeros, zeros > 0)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _advance(
    decoder: Decoder, params: dict[str, Any], bounds: Bounds, place: Place
) -> tuple[Place, Bool[Array, ""]]:
    """Add up to `PIECE` bytes to each beam; return whether all logits of beams that went on were finite."""
    ids = np.arange(VOCAB_SIZE, dtype=np.int32)
    drawable = jnp.asarray(np.isin(ids, (BOE, BOS, PAD), invert=True)) & bounds.allowed
    bounds = bounds._replace(allowed=drawable)

    def body(place: Place, _: None) -> tuple[Place, Bool[Array, ""]]:
        live = ~place.done & (place.nats > -jnp.inf)
        finite = jnp.all(jnp.isfinite(place.logits) | ~live[:, None])
        return _add_byte(decoder, params, bounds, place), finite

    place, finite = jax.lax.scan(body, place, length=PIECE)
    return place, jnp.all(finite)


def _add_byte(decoder: Decoder, params: dict[str, Any], bounds: Bounds, place: Place) -> Place:
    """Keep the best of all continuations that are one byte longer, and of those that have ended."""
    rows = len(place.nats)
    masked = jnp.where(bounds.allowed, place.logits[:, :VOCAB_SIZE], -jnp.inf)
    logits = jax.nn.log_softmax(place.logits[:, :VOCAB_SIZE], -1)
    nats = jnp.where(masked > -jnp.inf, logits, -jnp.inf)
    # Let a beam that has ended go on in one way, which costs nothing
    stay = jnp.where(jnp.arange(VOCAB_SIZE) == EOS, 0.0, -jnp.inf)
    sums = place.nats[:, None] + jnp.where(place.done[:, None], stay, nats)
    best, at = jax.lax.top_k(sums.reshape(-1), rows)
    parent, drawn = at // VOCAB_SIZE, at % VOCAB_SIZE
    done, count, row = place.done[parent], place.count[parent], jnp.arange(rows, dtype=jnp.int32)
    # Rule out rows beyond the beams: they come last, and hold the best of the rest
    best = jnp.where(row < bounds.beams, best, -jnp.inf)
    ids = place.ids[parent].at[row, jnp.where(done, place.ids.shape[1], count)].set(drawn, mode="drop")
    count = count + jnp.where(done, 0, 1)
    # End rows that are ruled out, so that a search ends with its last beam
    done = done | (drawn == EOS) | (count >= bounds.limit) | (best == -jnp.inf)
    state = take_rows(place.state, parent)
    after, _, state = decode_step(decoder, params, drawn, state, jnp.where(done, 0, 1))
    logits = jnp.where(done[:, None], place.logits[parent], after)
    return Place(state, logits, best, ids, count, done)
