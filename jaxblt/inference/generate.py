"""Continues prompts a batch at a time: one pass over the prompts, then byte by byte in pieces of a few steps."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple, overload

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxblt.adapters.code.fallback import count_replaced, warn_replaced
from jaxblt.adapters.code.override import refuse_inside
from jaxblt.adapters.update.row_adapters import Adapter, choose_adapters
from jaxblt.data.vocab import EOS, decode
from jaxblt.inference.decode import Decoder, DecoderState, decode_step
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.prepare import prepare_decoding
from jaxblt.inference.prompts import prefill
from jaxblt.inference.requests import Requests, bucket, each_of, lay_out
from jaxblt.inference.sampling import SamplingConfig, sample
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.finite import explain_nonfinite
from jaxblt.patching import warn_overflow
from jaxblt.random_keys import make_key
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
      seed: an integer from 0 to 2**32 - 1, with which equal prompts go on differently, or one for each prompt, with
        which each goes on as it would alone.
      stream: yield bytes as they come: lists with the next bytes of each prompt, at most 32, and b"" behind its end.
        Put together they are the bytes that are returned otherwise. Iterate under the mesh of the call.
      adapters: of a routed model (`update.row_adapters`), for all prompts or for each: the number of an expert of
        its bank, "base", "static", or None for what the router says. Values to one program, unless it is one None.
      alphabet: bytes that may be drawn, such as b"ACGT", for all prompts or for each; EOS may besides. None for all.

    Raises:
      ValueError: no prompts, a prompt that is not bytes, nothing to generate, a seed out of range, an adapter that
        there is not, or logits that are not finite; the message names the prompt and the position. Or it is called, or
        its iterator goes on, inside `given` or `guarded` of `jaxblt.adapters`.

    Warns:
      PatchOverflowWarning: blocks have fewer slots than the rows' patches ask for.
      CodeFallbackWarning: a router's code was not finite; its fallback stood for it in the prompts that are named.
    """
    _refuse_inside()
    table, requests = lay_out(prompts, max_new_bytes, sampling, seed, alphabet)
    params = nn.meta.unbox(params)
    if adapters is not None:
        params = {**params, CHOSEN: choose_adapters(decoder.model, each_of("adapters", adapters, len(table)))}
    pieces = _pieces(decoder, params, table, requests)
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
    prepared = narrow_params(apart, len(table), unroll_params(prepared), place.state)
    refused = replaced = None
    for start in range(0, most, steps):
        place, piece = _advancing(place)(apart, steps, prepared, requests, place, np.int32(start))
        (drawn, kept, finite, refused, replaced), done = jax.device_get((piece, place.done))
        _check_finite(finite, lengths, start, params)
        yield [decode(row[here]) for row, here in zip(drawn, kept, strict=True)]
        if done.all():
            break
    if decoder.patcher is not None and refused is not None:
        patcher, (over, wanted) = decoder.patcher, map(float, refused)
        warn_overflow(over, wanted, capacity=patcher.slots, block_size=patcher.block_size)
    if replaced is not None:
        warn_replaced(replaced, params)


def _refuse_inside() -> None:
    refuse_inside("generate", "leave it, and choose codes by adapters=, such as adapters='base'")


def _check_finite(finite: np.ndarray, lengths: np.ndarray, start: int, params: dict[str, Any]) -> None:
    """Raise for the first prompt with logits that are not finite.

    They stand `start` bytes and more behind the prompts.
    """
    if finite.all():
        return
    prompt = int(np.argmin(finite.all(1)))
    byte = start + int(np.argmin(finite[prompt]))
    raise ValueError(
        f"logits are not finite: prompt {prompt}, byte {byte} after its {lengths[prompt] - 1} bytes; "
        f"{explain_nonfinite(params)}"
    )


@flax.struct.dataclass
class Place:
    """The place of each row: the state, the logits of its next byte, and whether it has ended."""

    state: DecoderState
    logits: Float[Array, "B V"]
    done: Bool[Array, "B"]

    __repr__ = show


class Piece(NamedTuple):
    """The draws of some steps, whether a draw belongs to its row, and whether its logits were finite.

    `refused` counts patch boundaries refused and asked for, of all rows so far. `replaced` counts the tokens of each
    row so far whose code was not finite, if there is a router.
    """

    drawn: Int[Array, "B T"]
    kept: Bool[Array, "B T"]
    finite: Bool[Array, "B T"]
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
) -> Place:
    segments = (jnp.arange(prompts.shape[1], dtype=jnp.int32)[None] < lengths[:, None]).astype(jnp.int32)
    logits, state = prefill(decoder, params, prompts, segments, num_bytes=num_bytes)
    return Place(unroll_state(state), logits, jnp.zeros(lengths.shape, bool))


def _advancing(place: Place) -> Callable[..., tuple[Place, Piece]]:
    """Compile `_advance` so that a place leaves it laid out over the devices as it came.

    XLA would choose another layout for it, and compile the next piece anew.
    """
    leaves, tree = jax.tree.flatten(place)
    return _compiled(tree, tuple(leaf.sharding for leaf in leaves))


@cache
def _compiled(tree: Any, shardings: tuple[Any, ...]) -> Callable[..., tuple[Place, Piece]]:
    several = any(len(sharding.device_set) > 1 for sharding in shardings)
    laid_out = (jax.tree.unflatten(tree, shardings), None) if several else None
    # Donate the place: the caches of a long document would be there twice.
    return jax.jit(_advance, static_argnums=(0, 1), donate_argnums=4, out_shardings=laid_out)


def _advance(
    decoder: Decoder,
    steps: int,
    params: dict[str, Any],
    requests: Requests,
    place: Place,
    start: Int[Array, ""],
) -> tuple[Place, Piece]:
    """Add `steps` bytes to each row, of which the first is number `start` behind its prompt."""
    keys = _request_keys(requests.seeds, requests.indices)

    def body(place: Place, step: Array) -> tuple[Place, tuple[Array, ...]]:
        step_keys = jax.vmap(jax.random.fold_in)(keys, requests.lengths + step)
        ids = sample(requests.sampling, step_keys, place.logits, alphabet=requests.alphabet)
        finite = jnp.all(jnp.isfinite(place.logits), -1) | place.done
        ended = place.done | (ids == EOS)
        done = ended | (step + 1 >= requests.limits)
        logits, _, state = decode_step(decoder, params, ids, place.state, jnp.where(done, 0, 1))
        return Place(state, logits, done), (ids, ~ended, finite)

    place, (ids, kept, finite) = jax.lax.scan(body, place, start + jnp.arange(steps, dtype=jnp.int32))
    count = partial(jnp.sum, dtype=jnp.int32)
    refused = jax.tree.map(count, decoder.build().boundaries(place.state.model))
    return place, Piece(ids.T, kept.T, finite.T, refused, count_replaced(place.state.model))


def _request_keys(seeds: UInt32[Array, "B"], indices: UInt32[Array, "B"]) -> Key[Array, "B"]:
    return jax.vmap(lambda seed, number: jax.random.fold_in(make_key(seed), number))(seeds, indices)
