"""Rows cut into windows of a chunk's length, one after another; in each at most one chunk ends.

Chunks lie on the grid of their document. Where documents start on the rows' own grid, a window is a chunk. Elsewhere a
window holds tokens before the end of the first document's chunk, tokens behind it, and tokens of documents that began
inside the window. The latter read the memory that every document starts from.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels._compat import is_symbolic
from pallas_kernels._dispatch import current_device
from pallas_kernels._linear_state.chunks import into_chunks, missing, out_of_chunks
from pallas_kernels._linear_state.tokens import count_documents

FEW = 8
"""Windows of which the backward pass keeps every state."""
UNROLLED = 8
"""Steps of a loop that are written out one after another."""


class Windows(NamedTuple):
    """The windows of a row. None where documents start on the rows' grid, or there is only one.

    Attributes:
      begins: the first position is of another document than the window before.
      ends: a chunk ends in the window.
      at: positions of the window up to that end.
      first: positions of the same document as the first one.
      leaves: the last position is of another document than the first one.
    """

    begins: Bool[Array, "N B"] | None
    ends: Bool[Array, "N B"]
    at: Int[Array, "N B"] | None = None
    first: Bool[Array, "N B C"] | None = None
    leaves: Bool[Array, "N B"] | None = None


def window_size(chunk: int, length: int) -> int:
    """Return the positions of a window: a chunk, or the whole row if it is known to be shorter."""
    return chunk if is_symbolic(length) else min(chunk, length)


def cut_rows(
    segment_ids: Int[Array, "B T"] | None, shape: tuple[int, int], chunk: int, *, aligned: bool
) -> tuple[Windows, Int[Array, "B S"] | None]:
    """Return the windows, and which position of the row each of the chunks' positions is of.

    There are S = N C positions of chunks. The latter is None where windows are chunks.

    Args:
      segment_ids: documents.
      shape: B and T.
      chunk: C, at most T unless that is symbolic.
      aligned: documents start at multiples of C.
    """
    (rows, length), count = shape, -(-shape[1] // chunk)
    if segment_ids is None:
        whole = jnp.arange(count) < length // chunk
        return Windows(None, jnp.broadcast_to(whole[:, None], (count, rows))), None
    documents, ends = count_documents(segment_ids), _chunk_ends(segment_ids, chunk)
    numbers = _into_windows(documents, chunk, mode="edge")
    ends = _into_windows(ends, chunk)
    before = jnp.pad(numbers[:-1, :, -1], ((1, 0), (0, 0)))
    begins, there = numbers[:, :, 0] != before, jnp.any(ends, -1)
    if aligned:
        return Windows(begins, there), None
    at = jnp.where(there, jnp.argmax(ends, -1) + 1, chunk).astype(jnp.int32)
    first = numbers == numbers[:, :, :1]
    source = jnp.arange(count, dtype=jnp.int32)[:, None] * chunk + at - chunk
    source = source.T[:, :, None] + jnp.arange(chunk, dtype=jnp.int32)[None, None]
    source = jnp.clip(source, 0, length - 1).reshape(rows, -1)
    return Windows(begins, there, at, first, ~first[:, :, -1]), source


def _chunk_ends(segment_ids: Int[Array, "B T"], chunk: int) -> Bool[Array, "B T"]:
    """Mark tokens and holes whose number in their document is a multiple of `chunk`."""
    live, places = segment_ids != 0, jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    first = live & (jnp.cumsum(live, 1) == 1)
    new = first | (jnp.diff(count_documents(segment_ids), axis=1, prepend=0) > 0)
    start = lax.cummax(jnp.where(new, places, 0), axis=1)
    return live & ((places - start + 1) % chunk == 0)


def _into_windows(x: Shaped[Array, "B T"], chunk: int, mode: Any = "constant") -> Shaped[Array, "N B C"]:
    x = jnp.pad(x, ((0, 0), (0, missing(x.shape[1], chunk))), mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk), 1, 0)


def take_windows(
    x: Shaped[Array, "B T H ..."], chunk: int, source: Any = None
) -> Shaped[Array, "N B H C ..."]:
    """Return a stream by windows, or by the chunks that end in them."""
    if source is not None:
        x = jnp.take_along_axis(x, source.reshape(*source.shape, *(1,) * (x.ndim - 2)), 1)
    return into_chunks(x, chunk)


def leave_windows(y: Shaped[Array, "N B H C ..."], length: int) -> Shaped[Array, "B T H ..."]:
    """Undo `take_windows` for rows of `length` positions."""
    return out_of_chunks(y, length)


def choose(mask: Bool[Array, "B"] | None, new: Any, old: Any) -> Any:
    """Return rows of `new` where the mask says so, else of `old`."""
    if mask is None:
        return old
    return jax.tree.map(lambda a, b: jnp.where(mask.reshape(-1, *(1,) * (b.ndim - 1)), a, b), new, old)


def scan_windows(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    windows: Any,
    *,
    unrolled: bool = False,
) -> tuple[Any, Any]:
    """Run `lax.scan` with a backward pass that keeps every k-th state and makes the others.

    k is about the root of their number.

    Args:
      step: (state, window) -> (state, found). A window of zeros must leave the state as it is.
      state: before the first window.
      windows: pytree of arrays [N, ...].
      unrolled: write out up to `UNROLLED` steps of a group where a GPU runs them. A loop copies what it carries and
        keeps; without one a step's result stays where it was written.
    """
    count = jax.tree.leaves(windows)[0].shape[0]
    size = group_size(count)
    unroll = min(size, UNROLLED) if unrolled and current_device().platform != "cpu" else 1
    group = partial(lax.scan, step, unroll=unroll)
    if size == count:
        return group(state, windows)
    missing = missing_windows(count)

    def grouped(x: Array) -> Array:
        x = jnp.pad(x, ((0, missing),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    state, found = lax.scan(jax.checkpoint(group, prevent_cse=False), state, jax.tree.map(grouped, windows))
    return state, jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:count], found)


def group_size(count: int) -> int:
    """Return the windows from one kept state to the next.

    They are near the root of `count`, and best a divisor of it.
    """
    if is_symbolic(count) or count <= FEW:
        return count
    root = math.isqrt(count)
    sizes = range(max(2, root // 2), 2 * root + 1)
    return min(sizes, key=lambda size: (-count % size, size > UNROLLED, abs(size - root)))


def missing_windows(count: int) -> int:
    """Count windows of zeros that fill the last group."""
    return -count % group_size(count)
