"""The open chunk: tokens since the last edge of a chunk, which a call with a state puts in front of its own.

A mixer that does something at every C-th token of a document keeps the tokens of the chunk that has not ended. Behind
them the next call's tokens lie on the document's grid again:

    state:  a b c          call:  d e f g h          laid out, C = 4:  a b c d | e f g h          left open: nothing
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxblt.mixers.driver.base import select_rows
from jaxblt.mixers.driver.marks import Marks
from jaxblt.show import show


@flax.struct.dataclass
class OpenChunk:
    """Tokens and holes of a row's last document since its last edge, of which there are at most C - 1.

    Attributes:
      streams: pytree of arrays [B, H, C, ...], zero behind the last of them.
      content: True for tokens.
      count: tokens and holes.
    """

    streams: Any
    content: Bool[Array, "B H C"]
    count: Int[Array, "B H"]

    __repr__ = show


@flax.struct.dataclass
class Laid:
    """A call's tokens behind the open chunk: S = T + C - 1 places, the last ones free.

    Attributes:
      streams: pytree of arrays [B, S, H, ...].
      segment_ids: of the places; as ops take them.
      shift: tokens of the open chunk.
      whole: known while tracing that all tokens are of one document.
    """

    streams: Any
    segment_ids: Int[Array, "B S"]
    shift: Int[Array, "B"]
    whole: bool = flax.struct.field(pytree_node=False)


def no_tokens(streams: Any, chunk: int) -> OpenChunk:
    """Return an open chunk without tokens.

    It is made of streams [B, T, H, ...], so that it varies over devices as they do.
    """

    def empty(x: Array) -> Array:
        return jnp.zeros_like(jnp.moveaxis(jnp.repeat(x[:, :1], chunk, 1), 1, 2))

    first = jax.tree.leaves(streams)[0]
    count = jnp.zeros_like(first.reshape(*first.shape[:3], -1)[:, 0, :, 0], jnp.int32)
    return OpenChunk(
        jax.tree.map(empty, streams), jnp.zeros((*count.shape, chunk), bool) & (count > 0)[..., None], count
    )


def lay_out(opened: OpenChunk, streams: Any, marks: Marks) -> Laid:
    """Append streams [B, T, H, ...] of a call to those of the open chunk."""
    chunk, shape = opened.content.shape[2], jax.tree.leaves(streams)[0].shape
    shift, length = opened.count[:, 0], shape[1]
    ids = jnp.ones(shape[:2], jnp.int32) if marks.segment_ids is None else marks.segment_ids
    places = jnp.arange(length + chunk - 1, dtype=jnp.int32)[None]
    source = jnp.where(places < shift[:, None], places, places - shift[:, None] + chunk)
    source = jnp.minimum(source, chunk + length - 1)
    there = places < shift[:, None] + length

    def joined(before: Array, x: Array) -> Array:
        both = jnp.concatenate([jnp.moveaxis(before, 1, 2).astype(x.dtype), x], 1)
        return _take(both, source)

    # Give the open chunk the id of the call's first token: the driver starts it anew if that begins a document.
    first = jnp.take_along_axis(jnp.abs(ids), jnp.argmax(ids != 0, 1)[:, None], 1)
    before = jnp.where(opened.content[:, 0], first, -first)
    laid = jnp.where(there, _take(jnp.concatenate([before, ids], 1), source), 0)
    return Laid(jax.tree.map(joined, opened.streams, streams), laid, shift, marks.segment_ids is None)


def take_back(y: Any, laid: Laid, length: int) -> Any:
    """Take the outputs [B, S, ...] at the places of the call's own tokens."""
    source = laid.shift[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return jax.tree.map(lambda x: _take(x, source), y)


def left_open(laid: Laid, chunk: int) -> OpenChunk:
    """Return the chunk that is open behind the call."""
    ids, places = laid.segment_ids, jnp.arange(laid.segment_ids.shape[1], dtype=jnp.int32)[None]
    live, document = ids != 0, jnp.abs(ids)
    end = jnp.max(jnp.where(live, places + 1, 0), 1)
    new = live & (document != jnp.pad(document[:, :-1], ((0, 0), (1, 0))))
    start = jnp.max(jnp.where(new, places, 0), 1)
    count = (end - start) % chunk
    own = jnp.arange(chunk, dtype=jnp.int32)[None]
    source, open_ = (end - count)[:, None] + own, own < count[:, None]
    source = jnp.minimum(source, ids.shape[1] - 1)

    def kept(x: Array) -> Array:
        x = jnp.where(
            open_.reshape(*open_.shape, *(1,) * (x.ndim - 2)), _take(x, source), jnp.zeros((), x.dtype)
        )
        return jnp.moveaxis(x, 1, 2)

    streams = jax.tree.map(kept, laid.streams)
    heads = jax.tree.leaves(streams)[0].shape[1]
    content = _per_head(open_ & (_take(ids, source) > 0), heads)
    return OpenChunk(streams, content, _per_head(count, heads))


def append(opened: OpenChunk, streams: Any, marks: Marks) -> tuple[OpenChunk, Bool[Array, "B"]]:
    """Append one token, streams [B, 1, H, ...], to the open chunk.

    Also returns the rows in which the chunk is full now.
    """
    chunk, heads = opened.content.shape[2], opened.content.shape[1]
    ids = marks.segment_ids
    live = jnp.ones_like(opened.count[:, 0], bool) if ids is None else ids[:, 0] != 0
    content = live if ids is None else ids[:, 0] > 0
    # Drop places behind the chunk.
    place, row = jnp.where(live, opened.count[:, 0], chunk), jnp.arange(len(live), dtype=jnp.int32)

    def put(old: Array, x: Array) -> Array:
        """Write one place of each row: a select would read and write the whole chunk at each token."""
        return old.at[row, :, place].set(x.astype(old.dtype), mode="drop", unique_indices=True)

    streams = jax.tree.map(lambda old, x: put(old, x[:, 0]), opened.streams, streams)
    known = put(opened.content, _per_head(content, heads))
    count = opened.count + live[:, None].astype(jnp.int32)
    return OpenChunk(streams, known, count), count[:, 0] == chunk


def by_document(
    run: Callable[[Any, Marks, Any], tuple[Array, Any]], zero: Any, streams: Any, marks: Marks, carry: Any
) -> tuple[Any, Any]:
    """Run a call one document of each row after another.

    Returns outputs [B, T, H, ...] and the carry behind the call. There is no derivative unless all tokens are of one
    document: how many rounds there are is known on the device only.

    Args:
      run: (streams, marks, carry) -> (y, carry), of rows with tokens of one document, at their front.
      zero: the carry before a document.
      streams: pytree of arrays [B, T, H, ...].
      marks: what the positions are.
      carry: before the first of them.
    """
    if marks.segment_ids is None or marks.new is None or marks.begins is None:
        return run(streams, marks, carry)
    ids, live = marks.segment_ids, marks.segment_ids != 0
    number = jnp.cumsum(marks.new, 1, dtype=jnp.int32) - marks.begins[:, None].astype(jnp.int32)
    number = jnp.where(live, number, -1)
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]

    def round(state: Any) -> Any:
        now, y, carry = state
        inside = number == now
        there, first = jnp.any(inside, 1), jnp.argmax(inside, 1)[:, None].astype(jnp.int32)
        source = jnp.minimum(first + places, ids.shape[1] - 1)
        own = jnp.where(places < jnp.sum(inside, 1, keepdims=True), jnp.sign(_take(ids, source)), 0)
        found, after = run(jax.tree.map(lambda x: _take(x, source), streams), Marks(own), carry)
        found = _take(found, jnp.maximum(places - first, 0))
        y = jnp.where(inside.reshape(*inside.shape, *(1,) * (y.ndim - 2)), found, y)
        after = select_rows(there, after, carry)
        # Reset: what comes next in a row is another document.
        return now + 1, y, select_rows(jnp.max(number, 1) > now, zero, after)

    y = jax.eval_shape(lambda: run(streams, Marks(ids), carry)[0])
    start = jnp.zeros_like(jax.tree.leaves(streams)[0], y.dtype)
    more = lambda state: state[0] <= jnp.max(number)  # noqa: E731
    _, y, carry = jax.lax.while_loop(more, round, (jnp.int32(0), start, carry))
    return y, carry


def _take(x: Shaped[Array, "B S ..."], source: Int[Array, "B P"]) -> Shaped[Array, "B P ..."]:
    return jnp.take_along_axis(x, source.reshape(*source.shape, *(1,) * (x.ndim - 2)), 1)


def _per_head(x: Shaped[Array, "B ..."], heads: int) -> Shaped[Array, "B H ..."]:
    return jnp.repeat(x[:, None], heads, 1)
