"""Entropies of documents of any length from contexts of bounded length, the same however a row is cut.

With a context of C bytes a document is read in windows of C bytes that begin at its bytes 0, C/2, C, ... The entropy at
byte t comes from the first window up to byte C - 1. From then on it comes from the second half of the window that t
lies in. So the model sees between C/2 and C bytes, and never more than it was trained on. Which window that is depends
only on t, so that one pass, a stream in chunks and byte-by-byte decoding agree. Windows of even number do not overlap
each other, nor do those of odd number. So two rows of a model with a state, one for each kind, read every byte once.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import PAD
from jaxblt.patching.logits import entropies_from_logits

ApplyWithState = Callable[..., tuple[Array, Any]]
"""(params, ids, state, segment_ids=) -> (logits, state); any split into calls gives equal logits."""


@flax.struct.dataclass
class ContextState:
    """The place of each row's entropies in their contexts.

    Attributes:
      model: the model's state for 2 B rows, those of even windows first.
      position: of the next byte in its document.
      last_segment: document of the last byte; 0 before the first.
    """

    model: Any
    position: Int[Array, "B"]
    last_segment: Int[Array, "B"]


def init_contexts(init: Callable[[int, int], Any], rows: int, num_bytes: int, context: int | None) -> Any:
    """Return the state of `next_entropies` before the first byte.

    Args:
      init: (rows, capacity) -> the model's state for documents of at most `capacity` bytes.
      rows: of the stream.
      num_bytes: the most bytes of a document.
      context: bytes; None sets no bound, and the state is the model's own.
    """
    if context is None:
        return init(rows, num_bytes)
    check_context(context)
    position, last_segment = (jnp.zeros((rows,), jnp.int32) for _ in range(2))
    return ContextState(model=init(2 * rows, context), position=position, last_segment=last_segment)


def check_context(context: int) -> None:
    """Raise ValueError unless the context has two halves."""
    if context < 2 or context % 2:
        raise ValueError(f"a context of entropies is an even number of bytes, at least 2, got {context}")


def next_entropies(
    apply_with_state: ApplyWithState,
    params: Any,
    ids: Int[Array, "B T"],
    state: Any,
    segment_ids: Int[Array, "B T"],
    *,
    context: int | None,
) -> tuple[Float[Array, "B T"], Any]:
    """Return entropies in nats of predictions at each row's next bytes, and the next state.

    Args:
      apply_with_state: see `ApplyWithState`.
      params: of the model.
      ids: byte + 4.
      state: of `init_contexts` with the same context, or of the last call.
      segment_ids: documents; 0 where a row gets no byte, which leaves its state as it was.
      context: bytes, an even number; None sets no bound.
    """
    live = segment_ids > 0
    if context is None:
        logits, state = apply_with_state(params, ids, state, segment_ids=segment_ids)
        return jnp.where(live, entropies_from_logits(logits), 0.0), state
    position, after = _advance(state, segment_ids)
    half = context // 2
    windows = (position // context, (position + half) // context)
    # Rely on ids: neighbouring windows differ in theirs, and that empties the state between them
    lanes = [jnp.where(live, 2 * segment_ids + window % 2, 0) for window in windows]
    logits, model = apply_with_state(
        params, jnp.concatenate([ids, ids]), state.model, segment_ids=jnp.concatenate(lanes)
    )
    even, odd = jnp.split(entropies_from_logits(logits), 2)
    from_even = jnp.maximum(position // half - 1, 0) % 2 == 0
    return jnp.where(live, jnp.where(from_even, even, odd), 0.0), ContextState(model, *after)


def entropies_in_windows(
    entropies: Callable[[Int[Array, "R C"]], Float[Array, "R C"]], ids: Int[Array, "B L"], *, context: int
) -> Float[Array, "B L"]:
    """Compute `next_entropies` of one document a row in one pass, every window as a row.

    For models without a state.

    Args:
      entropies: of rows of `context` ids, each a document from its first byte.
      ids: byte + 4; the first stands at a multiple of half a context in its document. What a row's first half gives
        is of use only if it begins at the document's first byte.
      context: bytes, an even number.
    """
    check_context(context)
    rows, length = ids.shape
    half = context // 2
    ids = jnp.pad(ids, ((0, 0), (0, max(context, -(-length // half) * half) - length)), constant_values=PAD)
    halves = ids.reshape(rows, -1, half)
    windows = jnp.concatenate([halves[:, :-1], halves[:, 1:]], 2)
    found = entropies(windows.reshape(-1, context)).reshape(windows.shape)
    return jnp.concatenate([found[:, 0, :half], found[:, :, half:].reshape(rows, -1)], 1)[:, :length]


def _advance(
    state: ContextState, segment_ids: Int[Array, "B T"]
) -> tuple[Int[Array, "B T"], tuple[Int[Array, "B"], Int[Array, "B"]]]:
    """Return each byte's position in its document, and position and document to go on from."""
    live = segment_ids > 0
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    latest = jax.lax.cummax(jnp.where(live, index, -1), axis=1)
    # Put the state's last byte into column 0, so that every byte has one before it
    documents = jnp.concatenate([state.last_segment[:, None], segment_ids], 1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1) + 1
    fresh = live & (segment_ids != jnp.take_along_axis(documents, before, 1))
    count = jnp.cumsum(live, 1, dtype=jnp.int32) - 1
    start = jax.lax.cummax(jnp.where(fresh, count, -state.position[:, None]), axis=1)
    position = count - start
    last = latest[:, -1:] + 1
    reached = jnp.concatenate([state.position[:, None], position + 1], 1)
    at, document = (jnp.take_along_axis(x, last, 1)[:, 0] for x in (reached, documents))
    return position, (at, document)
