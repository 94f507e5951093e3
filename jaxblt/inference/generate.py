"""Continues prompts a batch at a time: one pass over the prompts, then byte by byte in pieces of a few steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.fallback import count_replaced
from jaxblt.adapters.code.override import refuse_inside
from jaxblt.adapters.update.row_adapters import Adapter, choose_adapters
from jaxblt.data.vocab import EOS, decode
from jaxblt.inference.decode import Decoder, DecoderState, decode_step
from jaxblt.inference.drafted import drafted_pieces
from jaxblt.inference.drafts import DraftCounts, Drafts
from jaxblt.inference.in_place import advancing
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import prefill
from jaxblt.inference.reports import refuse_nonfinite, warn_of_rows
from jaxblt.inference.requests import Requests, bucket, each_of, lay_out, request_keys
from jaxblt.inference.sampling import SamplingConfig, draw_noise, sample_by
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.packed import Packed, pack_small
from jaxblt.show import show

PIECE = 32
"""Bytes of a row that one call of a compiled program draws, before the host looks whether all rows have ended."""


@overload
def generate(
    decoder: Decoder,
    params: dict[str, Any],
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int | Sequence[int],
    sampling: SamplingConfig | Sequence[SamplingConfig] = ...,
    seed: int | Sequence[int] = ...,
    stream: Literal[False] = ...,
    adapters: Adapter | Sequence[Adapter] = ...,
    alphabet: bytes | Sequence[bytes | None] | None = ...,
    drafts: Drafts | None = ...,
    report: Callable[[DraftCounts], None] | None = ...,
) -> list[bytes]:
    """Return all bytes at once."""


@overload
def generate(
    decoder: Decoder,
    params: dict[str, Any],
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int | Sequence[int],
    sampling: SamplingConfig | Sequence[SamplingConfig] = ...,
    seed: int | Sequence[int] = ...,
    stream: Literal[True],
    adapters: Adapter | Sequence[Adapter] = ...,
    alphabet: bytes | Sequence[bytes | None] | None = ...,
    drafts: Drafts | None = ...,
    report: Callable[[DraftCounts], None] | None = ...,
) -> Iterator[list[bytes]]:
    """Yield bytes as they come."""


def generate(
    decoder: Decoder,
    params: dict[str, Any],
    prompts: Sequence[bytes],
    *,
    max_new_bytes: int | Sequence[int],
    sampling: SamplingConfig | Sequence[SamplingConfig] = SamplingConfig(),
    seed: int | Sequence[int] = 0,
    stream: bool = False,
    adapters: Adapter | Sequence[Adapter] = None,
    alphabet: bytes | Sequence[bytes | None] | None = None,
    drafts: Drafts | None = None,
    report: Callable[[DraftCounts], None] | None = None,
) -> list[bytes] | Iterator[list[bytes]]:
    """Return the bytes that follow each prompt, until EOS or `max_new_bytes`.

    The byte at position p behind prompt i is drawn by fold_in(fold_in(key(seed), i), p), where the BOS has position 0.
    With a seed for each prompt it is fold_in(fold_in(key(seed[i]), 0), p): the prompt's place in the list no longer
    matters. The other prompts never do.

    Sampling, seeds, limits and the prompts' lengths are values to the compiled programs. A new program is compiled for
    another number of prompts, a longest prompt beyond the next multiple of 64 bytes, and caches of another bucket.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      prompts: may be empty; a BOS comes before each.
      max_new_bytes: bytes to draw at the most, for all prompts or for each.
      sampling: how a byte is drawn, for all prompts or for each.
      seed: an integer from 0 to 2**32 - 1, with which equal prompts go on differently. With one for each prompt, each
        goes on as it would alone.
      stream: yield bytes as they come: lists with the next bytes of each prompt, at most 32, and b"" behind its end.
        Put together they are the bytes that are returned otherwise. Iterate under the mesh of the call.
      adapters: of a routed model (`update.row_adapters`), for all prompts or for each. It is the number of an expert of
        its bank, "base", "static", or None for what the router says. Values to one program, unless it is one None.
      alphabet: bytes that may be drawn, such as b"ACGT", for all prompts or for each; EOS may besides. None for all.
      drafts: bytes to guess and to check in one call, so that bytes come in fewer calls. With any `Drafts` they are the
        same, bit by bit of the logits that they are drawn from. Without, logits are rounded otherwise, which may turn
        a draw. None draws byte by byte. Streamed pieces have up to 136 bytes of a prompt.
      report: called once, with what the drafts were good for, when all bytes are drawn.

    Raises:
      ValueError: no prompts, a prompt that is not bytes, nothing to generate, a seed out of range, an unknown adapter,
        or a report without drafts.
      ValueError: logits are not finite; the message names the prompt and the position.
      ValueError: it is called, or its iterator goes on, inside `given` or `guarded` of `jaxblt.adapters`.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the rows' patches ask for.
      CodeFallbackWarning: a router's code was not finite; its fallback stood for it in the prompts that are named.
    """
    _refuse_inside()
    table, requests = lay_out(prompts, max_new_bytes, sampling, seed, alphabet)
    params = nn.meta.unbox(params)
    if adapters is not None:
        params = {**params, CHOSEN: choose_adapters(decoder.model, each_of("adapters", adapters, len(table)))}
    _check_drafts(drafts, report)
    if drafts is None:
        pieces = _pieces(decoder, params, table, requests)
    else:
        pieces = _outside(drafted_pieces(decoder, params, table, requests, drafts, report))
    if stream:
        return pieces
    return [b"".join(parts) for parts in zip(*pieces, strict=True)]


def _pieces(
    decoder: Decoder, params: dict[str, Any], table: Int[Array, "B L"], requests: Requests
) -> Iterator[list[bytes]]:
    """Yield the next bytes of each row, piece after piece, until all rows have ended."""
    _refuse_inside()
    most, lengths = int(np.max(requests.limits)), np.asarray(requests.lengths)
    steps = min(PIECE, 1 << (most - 1).bit_length())
    num_bytes = table.shape[1] + bucket(most)
    prepared = prepare_decoding(decoder, params, rows=len(table), num_bytes=num_bytes)
    place = _begin(decoder, num_bytes, prepared, table, requests.lengths)
    apart = unrolled(decoder)
    prepared = _narrow(apart, len(table), unroll_params(prepared), place)
    refused = replaced = None
    advance = partial(advancing(_advance, place), apart, steps, prepared, requests)
    for start, piece in _sent(advance, place, range(0, most, steps)):
        drawn, kept, finite, done, refused, replaced = jax.device_get(piece)
        _check_finite(finite, lengths, start, params)
        yield [decode(row[here]) for row, here in zip(drawn, kept, strict=True)]
        if done.all():
            break
    warn_of_rows(decoder, params, refused, replaced)


def _sent(
    advance: Callable[..., tuple[Packed, "Piece"]], place: Packed, starts: Iterable[int]
) -> Iterator[tuple[int, "Piece"]]:
    """Yield each piece once the next one is sent, which the device draws while the host reads this one."""
    before = None
    for start in starts:
        place, piece = advance(place, np.int32(start))
        if before is not None:
            yield before
        before = start, piece
    assert before is not None
    yield before


def _check_drafts(drafts: Any, report: Any) -> None:
    if not (drafts is None or isinstance(drafts, Drafts)):
        raise ValueError(f"drafts must be a Drafts, such as Drafts(count=8), or None, got {drafts!r:.80}")
    if drafts is None and report is not None:
        raise ValueError("report tells of drafts, and there are none: give drafts=Drafts(), or leave it out")


def _outside(pieces: Iterator[list[bytes]]) -> Iterator[list[bytes]]:
    """Refuse to go on inside an override of codes."""
    _refuse_inside()
    yield from pieces


def _refuse_inside() -> None:
    refuse_inside("generate", "leave it, and choose codes by adapters=, such as adapters='base'")


def _check_finite(finite: np.ndarray, lengths: np.ndarray, start: int, params: dict[str, Any]) -> None:
    """Raise for the first prompt with logits that are not finite.

    They stand `start` bytes and more behind the prompts.
    """
    if not finite.all():
        prompt = int(np.argmin(finite.all(1)))
        refuse_nonfinite(prompt, start + int(np.argmin(finite[prompt])), lengths[prompt], params)


@flax.struct.dataclass
class Place:
    """The place of each row: the state, the logits of its next byte, and whether it has ended."""

    state: DecoderState
    logits: Float[Array, "B V"]
    done: Bool[Array, "B"]

    __repr__ = show


class Piece(NamedTuple):
    """The draws of some steps, whether a draw belongs to its row, and whether its logits were finite.

    `done` tells which rows have ended. `refused` counts patch boundaries refused and asked for, of all rows so far.
    `replaced` counts the tokens of each row so far whose code was not finite, if there is a router.
    """

    drawn: Int[Array, "B T"]
    kept: Bool[Array, "B T"]
    finite: Bool[Array, "B T"]
    done: Bool[Array, "B"]
    refused: tuple[Array, Array] | None
    replaced: Int[Array, "B"] | None

    __repr__ = show


@partial(jax.jit, static_argnums=(0, 1))
def _begin(
    decoder: Decoder,
    num_bytes: int,
    params: dict[str, Any],
    prompts: Int[Array, "B L"],
    lengths: Int[Array, "B"],
) -> Packed:
    segments = (jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.int32)
    logits, state = prefill(decoder, params, prompts, segments, num_bytes=num_bytes)
    return pack_small(Place(unroll_state(state), logits, jnp.zeros(lengths.shape, bool)))


@partial(jax.jit, static_argnums=(0, 1))
def _narrow(decoder: Decoder, rows: int, params: dict[str, Any], packed: Packed) -> dict[str, Any]:
    # Unpack in here: a program that returned the place would copy its caches
    return narrow_params(decoder, rows, params, packed.unpack().state)


def _advance(
    decoder: Decoder,
    steps: int,
    params: dict[str, Any],
    requests: Requests,
    packed: Packed,
    start: Int[Array, ""],
) -> tuple[Packed, Piece]:
    """Add `steps` bytes to each row, of which the first is number `start` behind its prompt."""
    every = start + jnp.arange(steps, dtype=jnp.int32)
    places = requests.lengths[None] + every[:, None]
    keys = jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(request_keys(requests), places)
    noise = draw_noise(keys, decoder.model.vocab_size)

    def body(packed: Packed, given: tuple[Array, Array]) -> tuple[Packed, tuple[Array, ...]]:
        place, (step, noise) = packed.unpack(), given
        ids = sample_by(requests.sampling, noise, place.logits, alphabet=requests.alphabet)
        finite = jnp.all(jnp.isfinite(place.logits), -1) | place.done
        ended = place.done | (ids == EOS)
        done = ended | (step + 1 >= requests.limits)
        logits, _, state = decode_step(decoder, params, ids, place.state, jnp.where(done, 0, 1))
        return pack_small(Place(state, logits, done)), (ids, ~ended, finite)

    packed, (ids, kept, finite) = jax.lax.scan(body, packed, (every, noise))
    place: Place = packed.unpack()
    count = partial(jnp.sum, dtype=jnp.int32)
    refused = jax.tree.map(count, decoder.build().boundaries(place.state.model))
    return packed, Piece(ids.T, kept.T, finite.T, place.done, refused, count_replaced(place.state.model))
