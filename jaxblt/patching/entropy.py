"""Entropies of a byte model's predictions: of a batch in one pass, or of a long stream in chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from jaxblt.array_checks import check_ids, check_rows, check_segments
from jaxblt.data.vocab import PAD, VOCAB_SIZE
from jaxblt.patching.contexts import ApplyWithState, next_entropies
from jaxblt.patching.logits import entropies_from_logits
from jaxblt.validation import whole


def byte_entropies(
    apply: Callable[..., tuple[Array, Any]],
    params: Any,
    ids: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Return the entropy in nats of the prediction made at each byte, by a frozen model.

    No gradient flows; padding gets 0.

    Args:
      apply: `model.apply` of a causal language model: (params, ids, segment_ids=, positions=) -> (logits [B, T, V],
        patches).
      params: of the model.
      ids: byte + 4.
      segment_ids: documents, 0 for padding.
      positions: offsets in the documents.

    Raises:
      ValueError: outside of jit, an id or segment id is out of range.
    """
    _check_bytes(ids, segment_ids)
    logits, _ = apply(jax.lax.stop_gradient(params), ids, segment_ids=segment_ids, positions=positions)
    return _finish(logits, segment_ids)


def stream_entropies(
    apply_with_state: ApplyWithState,
    params: Any,
    ids: Int[Array, "B T"],
    init_state: Any,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk: int = 1024,
    context: int | None = None,
) -> Float[Array, "B T"]:
    """Compute `byte_entropies` of long rows chunk by chunk, the model's state carried along.

    Logits of one chunk are held at a time. The last chunk is filled up with what is no token (segment 0).

    Args:
      apply_with_state: (params, ids, state, segment_ids=) -> (logits, state); any split into calls gives
        equal logits.
      params: of the model.
      ids: byte + 4.
      init_state: before the first byte; of `init_contexts` where there is a context.
      segment_ids: documents, 0 for padding; None is one document a row.
      chunk: bytes in a call.
      context: most bytes that the model sees, an even number (see `jaxblt.patching.contexts`). None sets no bound:
        entropies far into a document then come from further back than the model was trained to look.

    Raises:
      ValueError: chunk is not positive; or (outside of jit) an id or segment id is out of range.
    """
    whole("chunk", chunk, least=1)
    _check_bytes(ids, segment_ids)
    if segment_ids is None:
        segment_ids = jnp.ones(ids.shape, jnp.int32)
    length = ids.shape[1]
    params = jax.lax.stop_gradient(params)

    def chunks(x: Int[Array, "B T"], fill: int) -> Int[Array, "n B chunk"]:
        x = jnp.pad(x, ((0, 0), (0, -length % chunk)), constant_values=fill)
        return rearrange(x, "b (n c) -> n b c", c=chunk)

    def step(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        found, state = next_entropies(apply_with_state, params, inputs[0], state, inputs[1], context=context)
        return state, jax.lax.stop_gradient(found)

    _, entropies = jax.lax.scan(step, init_state, (chunks(ids, PAD), chunks(segment_ids, 0)))
    return rearrange(entropies, "n b c -> b (n c)")[:, :length]


def _check_bytes(ids: Any, segment_ids: Any) -> None:
    check_rows("ids", ids)
    check_ids(ids, VOCAB_SIZE)
    if segment_ids is not None:
        check_segments(segment_ids)


def _finish(logits: Float[Array, "B T V"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
    entropies = jax.lax.stop_gradient(entropies_from_logits(logits))
    return entropies if segment_ids is None else jnp.where(segment_ids > 0, entropies, 0.0)
