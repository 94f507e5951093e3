"""Where the documents of packed rows lie: from segment ids to starts and lengths, by size class.

A kernel that is told of documents needs room for a fixed number of them, each as long as the longest it may meet,
and its scratch memory is their product. A row of T tokens has fewer than RATIO documents longer than T / RATIO,
fewer than RATIO^2 longer than T / RATIO^2, and so on; so one call a class of sizes has room for all but the
shortest in RATIO times the tokens, where a single call for up to T documents would need T times.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from pallas_kernels._compat import count_below

RATIO = 8
"""Of the longest documents of one class to those of the next, and of a class's room to the tokens."""
SHORTEST = 512
"""Tokens of the longest document of a class are no fewer."""
MULTIPLE = 512
"""What a row's length is a multiple of, for its classes to be whole and even."""


class Documents(NamedTuple):
    """The documents of one class, in order of place.

    Attributes:
      starts: of each, as an index into all tokens, row after row; the number of tokens where there is none.
      lengths: in tokens; 0 where there is none.
    """

    starts: Int[Array, "N"]
    lengths: Int[Array, "N"]


class Layout(NamedTuple):
    """Documents by class, longest first, and for every token where it is among them.

    Attributes:
      documents: of each class.
      size_class: of the token's document; -1 if it is no token.
      slot: the document's place in its class.
      offset: the token's place in its document.
      complete: every document is one run of its row, and there was room for all of them.
    """

    documents: tuple[Documents, ...]
    size_class: Int[Array, "B T"]
    slot: Int[Array, "B T"]
    offset: Int[Array, "B T"]
    complete: Bool[Array, ""]


def longest_by_class(length: int) -> tuple[int, ...]:
    """Return tokens of each class's longest document, for rows of `length` tokens: each RATIO times the next."""
    sizes = [length]
    while sizes[-1] % (2 * RATIO) == 0 and sizes[-1] // RATIO >= SHORTEST:
        sizes.append(sizes[-1] // RATIO)
    return tuple(sizes)


def find_documents(segment_ids: Int[Array, "B T"]) -> Layout:
    """Find the documents of all rows: runs of one id > 0.

    `complete` is False if an id does not exceed all before it in its row (a document may be in two runs then, as it
    is with holes in it), or if more documents fall into the last class than RATIO times as many as would fill all
    rows at its size. The other classes cannot overflow.
    """
    rows, length = segment_ids.shape
    sizes = longest_by_class(length)
    opens, tokens, offset, complete = _runs(segment_ids)
    smaller = ((tokens <= size).astype(jnp.int32) for size in sizes[1:])
    size_class = jnp.where(segment_ids > 0, sum(smaller, jnp.zeros_like(tokens)), -1)

    documents, slot = [], jnp.zeros_like(tokens)
    for number, size in enumerate(sizes):
        mine, room = size_class == number, RATIO * rows * length // size
        counted = jnp.cumsum((opens & mine).reshape(-1), dtype=jnp.int32)
        starts = count_below(counted, jnp.arange(1, room + 1, dtype=jnp.int32))
        lengths = jnp.take(tokens.reshape(-1), starts, mode="fill", fill_value=0)
        documents.append(Documents(starts, lengths))
        slot = jnp.where(mine, counted.reshape(rows, length) - 1, slot)
        complete &= counted[-1] <= room
    return Layout(tuple(documents), size_class, slot, offset, complete)


def _runs(
    segment_ids: Int[Array, "B T"],
) -> tuple[Bool[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Bool[Array, ""]]:
    """Return whether a document begins, its length, the token's place in it, and whether all ids rise."""
    ids = jnp.maximum(segment_ids, 0)
    before, after = jnp.pad(ids[:, :-1], ((0, 0), (1, 0))), jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
    opens, closes = (ids > 0) & (ids != before), (ids > 0) & (ids != after)
    index = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    first = lax.cummax(jnp.where(opens, index, 0), axis=1)
    last = lax.cummin(jnp.where(closes, index, ids.shape[1] - 1), axis=1, reverse=True)
    rising = jnp.all(~opens | (ids > lax.cummax(before, axis=1)))
    return opens, last - first + 1, index - first, rising
