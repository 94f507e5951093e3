"""Prompts in chunks of many bytes: the state that feeding them byte by byte would have left."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from jaxblt.inference.decode import Decoder, DecoderState, init_decoder, spoil
from jaxblt.models import ByteLMConfig
from jaxblt.models.blt_prefill import last_index
from jaxblt.parallel.sequence import seq_axis
from jaxblt.patching import prefill_patcher

CHUNK = 1024
"""Bytes of a prompt in one call: what a call holds of activations and scores does not grow with the prompt."""


def prefill(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    num_bytes: int,
) -> tuple[Float[Array, "B V"], DecoderState]:
    """Logits of the byte after each prompt, and the state from which `decode_step` goes on.

    Entropies come first, chunk after chunk, then the patches of all bytes at once, then the model chunk after chunk.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      ids: a prompt a row.
      segment_ids: 1 for its bytes, of which there is at least one, and 0 behind them.
      num_bytes: the most bytes that a row is to hold, its prompt included.
    """
    state = init_decoder(decoder, ids.shape[0], num_bytes=num_bytes)
    size, ids, segment_ids = _fitted(decoder, ids, segment_ids)
    model = decoder.model.build(dtype=decoder.dtype)
    variables, start = {"params": params["model"]}, (state.model, _no_logits(decoder, ids))
    if isinstance(decoder.model, ByteLMConfig):

        def read(carry: Any, ids: Array, segments: Array) -> tuple[Any, None]:
            logits, moved = model.apply(variables, ids, carry[0], segment_ids=segments, method="stream")
            latest = jnp.take_along_axis(logits, last_index(segments)[:, None, None], 1)[:, 0]
            return _latest(carry, moved, latest, segments), None

        (moved, logits), _ = _in_chunks(read, start, (ids, segment_ids), size)
        return logits, DecoderState(model=moved)
    assert decoder.patcher is not None
    entropies, entropy = _entropies(decoder, params, ids, segment_ids, state.entropy, size)
    patcher, closed = prefill_patcher(decoder.patcher, ids, entropies, segment_ids)

    def take(carry: Any, ids: Array, closed: Array, segments: Array) -> tuple[Any, None]:
        latest, moved = model.apply(variables, ids, closed, carry[0], segment_ids=segments, method="prefill")
        return _latest(carry, moved, latest, segments), None

    (moved, logits), _ = _in_chunks(take, start, (ids, closed, segment_ids), size)
    logits = spoil(logits, entropies, segment_ids)
    return logits, DecoderState(model=moved, entropy=entropy, patcher=patcher)


def _fitted(
    decoder: Decoder, ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> tuple[int, Int[Array, "B L"], Int[Array, "B L"]]:
    """Bytes of a chunk, whole blocks, and the rows; under a `seq` axis both divide among its devices."""
    block = 1 if decoder.patcher is None else decoder.patcher.block_size
    axis = seq_axis()
    if axis is not None:
        block *= axis.size
        ids, segment_ids = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))) for x in (ids, segment_ids))
    return max(1, CHUNK // block) * block, ids, segment_ids


def _no_logits(decoder: Decoder, ids: Int[Array, "B T"]) -> Float[Array, "B V"]:
    return jnp.zeros((len(ids), decoder.model.vocab_size), jnp.float32)


def _latest(carry: Any, moved: Any, logits: Float[Array, "B V"], segments: Int[Array, "B T"]) -> Any:
    """The state, and the logits of the last byte so far: a row without bytes in this chunk keeps its own."""
    return moved, jnp.where(segments[:, :1] != 0, logits, carry[1])


def _entropies(
    decoder: Decoder,
    params: Any,
    ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    state: Any,
    size: int,
) -> tuple[Float[Array, "B T"], Any]:
    assert decoder.patcher is not None
    if not decoder.patcher.needs_entropies:
        return jnp.zeros(ids.shape, jnp.float32), None

    def read(state: Any, ids: Array, segments: Array) -> tuple[Any, Array]:
        entropies, state = decoder.next_entropies(params, ids, state, segments)
        return state, entropies

    state, entropies = _in_chunks(read, state, (ids, segment_ids), size)
    return entropies, state


def _in_chunks(
    call: Callable[..., tuple[Any, Any]], carry: Any, arrays: tuple[Array, ...], size: int
) -> tuple[Any, Any]:
    """`call(carry, *chunk)` over chunks of `size` along axis 1 in one loop, then over the rest; outputs joined."""
    length = arrays[0].shape[1]
    whole, outputs = length // size * size, []
    if whole:
        chunks = [rearrange(x[:, :whole], "b (n s) -> n b s", s=size) for x in arrays]
        carry, out = jax.lax.scan(lambda carry, chunk: call(carry, *chunk), carry, chunks)
        outputs.append(jax.tree.map(lambda x: rearrange(x, "n b s -> b (n s)"), out))
    if whole < length:
        carry, out = call(carry, *(x[:, whole:] for x in arrays))
        outputs.append(out)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *outputs)
