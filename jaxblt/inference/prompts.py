"""Prompts in chunks of many bytes: the state that feeding them byte by byte would have left."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from jaxblt.inference.decode import Decoder, DecoderState, are_sound, init_decoder
from jaxblt.parallel.sequence import seq_axis

CHUNK = 1024
"""Bytes of a prompt in one call: what a call holds of activations and scores does not grow with the prompt."""

Prefix = tuple[DecoderState, Float[Array, "B V"], Bool[Array, "B"]]
"""State and logits behind a part of the prompts, and whether all entropies so far were finite."""


def prefill(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    num_bytes: int,
) -> tuple[Float[Array, "B V"], DecoderState]:
    """Return logits of the byte after each prompt, and the state for `decode_step`.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}, as they are or of `prepare_decoding`.
      ids: a prompt a row.
      segment_ids: 1 for its bytes, of which there is at least one, and 0 behind them.
      num_bytes: the most bytes that a row is to hold, its prompt included.
    """
    size, ids, segment_ids = _fitted(decoder.build().grid, ids, segment_ids)
    start = begin_prompts(decoder, len(ids), num_bytes=num_bytes)
    read = partial(read_piece, decoder, params)
    state, logits, sound = _in_chunks(read, start, (ids, segment_ids), size)
    return jnp.where(sound[:, None], logits, jnp.nan), state


def begin_prompts(decoder: Decoder, rows: int, *, num_bytes: int) -> Prefix:
    """Return what `read_piece` begins with."""
    state = init_decoder(decoder, rows, num_bytes=num_bytes)
    return state, jnp.zeros((rows, decoder.model.vocab_size), jnp.float32), jnp.ones((rows,), bool)


def read_piece(
    decoder: Decoder,
    params: dict[str, Any],
    before: Prefix,
    ids: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"],
) -> Prefix:
    """Read the next bytes of each prompt.

    All pieces of a prompt but its last are of a multiple of the model's grid.
    """
    state, logits, sound = before
    entropies, entropy = decoder.next_entropies(params, ids, state.entropy, segment_ids)
    latest, moved = decoder.build().apply(
        decoder.variables(params, "model"),
        ids,
        state.model,
        segment_ids=segment_ids,
        entropies=entropies,
        method="prefill",
    )
    # Keep the logits of its last byte in a row without bytes in this piece
    logits = jnp.where(segment_ids[:, :1] != 0, latest, logits)
    return DecoderState(model=moved, entropy=entropy), logits, sound & are_sound(entropies, segment_ids)


def _fitted(
    grid: int, ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[int, Int[Array, "B L"], Int[Array, "B L"]]:
    """Return the bytes of a chunk, on the model's grid, and the rows.

    Under a `seq` axis both divide among its devices.
    """
    axis = seq_axis()
    if axis is not None:
        grid *= axis.size
        ids, segment_ids = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % grid))) for x in (ids, segment_ids))
    return max(1, CHUNK // grid) * grid, ids, segment_ids


def _in_chunks[C](call: Callable[..., C], carry: C, arrays: tuple[Array, ...], size: int) -> C:
    """Loop `call(carry, *chunk)` over chunks of `size` along axis 1, then call it on the rest."""
    length = arrays[0].shape[1]
    whole = length // size * size
    if whole:
        chunks = [rearrange(x[:, :whole], "b (n size) -> n b size", size=size) for x in arrays]
        carry, _ = jax.lax.scan(lambda carry, chunk: (call(carry, *chunk), None), carry, chunks)
    if whole < length:
        carry = call(carry, *(x[:, whole:] for x in arrays))
    return carry
