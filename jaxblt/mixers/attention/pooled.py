"""Pooled blocks of keys: the mean of each block of a document that is complete, and the blocks a token chooses by them.

A block is `size` steps of a document, counted from its start. Holes count as steps and hold nothing. Blocks lie on the
document's own grid, so they are the same in packed rows, alone, and in a stream.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.parallel.attention.plan import query_runs
from jaxblt.parallel.sequence import SeqAxis
from jaxblt.show import show
from pallas_kernels.attention import attention, explain_split, masks, split_attention
from pallas_kernels.attention.chosen import select
from pallas_kernels.attention.chosen.places import Places
from pallas_kernels.attention.rules import BlocksBefore

NEVER = 1 << 30
"""Index of the end of a block that is not there."""


class Pooled(NamedTuple):
    """Complete blocks, in no order; those that are not there have id 0.

    Attributes:
      k, v: means of keys and of values.
      p: means of a predictor's keys, or None.
      ids: of their documents.
      numbers: of the blocks in their documents.
    """

    k: Float[Array, "B M G K"]
    v: Float[Array, "B M G K"]
    p: Float[Array, "B M G K"] | None
    ids: Int[Array, "B M"]
    numbers: Int[Array, "B M"]

    @property
    def keys(self) -> Float[Array, "B M G K"]:
        """Keys that queries choose by: a predictor's if there is one."""
        return self.k if self.p is None else self.p

    @property
    def places(self) -> Places:
        """Documents and numbers."""
        return Places(self.ids, self.numbers)

    def join(self, other: "Pooled") -> "Pooled":
        """Return the blocks of both."""
        return jax.tree.map(lambda *pair: jnp.concatenate(pair, 1), self, other)


@flax.struct.dataclass
class Sums:
    """Sums of keys, values and a predictor's keys over the tokens of blocks, fp32, and how many tokens there are."""

    k: Float[Array, "B M G K"]
    v: Float[Array, "B M G K"]
    p: Float[Array, "B M G K"] | None
    tokens: Float[Array, "B M"]

    __repr__ = show

    def pool(self, ids: Int[Array, "B M"], numbers: Int[Array, "B M"], dtype: jnp.dtype) -> Pooled:
        """Return the means of blocks of documents `ids`; a block without tokens is not there."""
        count = jnp.maximum(self.tokens, 1)[..., None, None]
        k, v, p = jax.tree.map(lambda x: (x / count).astype(dtype), (self.k, self.v, self.p))
        return Pooled(k, v, p, jnp.where(self.tokens > 0, ids, 0), numbers)


def find_ends(times: Int[Array, "B T"], live: Bool[Array, "B T"], size: int) -> Int[Array, "B M"]:
    """Return the indices of tokens that complete a block, in order, then `NEVER`; room for all there may be."""
    return _sorted_ends(live & ((times + 1) % size == 0), -(-times.shape[1] // size))


def find_all_ends(times: Int[Array, "B T"], document: Int[Array, "B T"], size: int) -> Int[Array, "B M"]:
    """Return the indices of the last tokens of all blocks of documents longer than a block, in order, then `NEVER`.

    A document's last block may be short. Documents of a block or less have none: their tokens all see each other.
    """
    last = document != jnp.pad(document[:, 1:], ((0, 0), (0, 1)))
    ends = (document > 0) & (((times + 1) % size == 0) | (last & (times >= size)))
    # Each short block has a whole one before it.
    return _sorted_ends(ends, 2 * -(-times.shape[1] // size))


def _sorted_ends(ends: Bool[Array, "B T"], most: int) -> Int[Array, "B M"]:
    index = jnp.arange(ends.shape[1], dtype=jnp.int32)[None]
    return jnp.sort(jnp.where(ends, index, NEVER), 1)[:, :most]


def at_ends(x: Int[Array, "B T"], ends: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Return numbers of the tokens that complete blocks; 0 where there is no block."""
    found = jnp.take_along_axis(x, jnp.minimum(ends, x.shape[1] - 1), 1)
    return jnp.where(ends < NEVER, found, 0)


def sum_blocks[T](
    values: T,
    counted: Int[Array, "B T"],
    wanted: Int[Array, "B M"],
    ends: Int[Array, "B M"],
    size: int,
) -> tuple[T, Float[Array, "B M"]]:
    """Sum the `size` tokens up to each end, of those tokens whose number in `counted` is the block's in `wanted`.

    Ends may lie outside of the tokens in hand, which are then a part of the block.

    Returns:
      The sums of each array [B, T, ...] of the pytree `values`, and how many tokens there are.
    """
    length = counted.shape[1]
    place = ends[..., None] + jnp.arange(1 - size, 1, dtype=jnp.int32)[None, None]
    inside = jnp.clip(place, 0, length - 1).reshape(ends.shape[0], ends.shape[1] * size)
    there = jnp.take_along_axis(counted, inside, 1).reshape(place.shape) == wanted[..., None]
    there &= (place >= 0) & (place < length)

    def summed(x: Array) -> Array:
        return jnp.sum(take_tokens(x, place, there).reshape(*place.shape, *x.shape[2:]), 2, dtype=jnp.float32)

    return jax.tree.map(summed, values), jnp.sum(there, -1, dtype=jnp.float32)


def take_tokens(
    x: Shaped[Array, "B T ..."], place: Int[Array, "B M size"], there: Bool[Array, "B M size"]
) -> Shaped[Array, "B tokens ..."]:
    """Return tokens by place, each at most once; 0 where not `there`."""
    shape = (place.shape[0], place.shape[1] * place.shape[2])
    # Give what is not there a place of its own, too: where places repeat, XLA adds gradients by atomics.
    nowhere = x.shape[1] + jnp.arange(shape[1], dtype=jnp.int32)[None]
    place = jnp.where(there.reshape(shape), place.reshape(shape), nowhere)
    return jax.vmap(lambda x, place: x.at[place].get(mode="fill", fill_value=0, unique_indices=True))(
        x, place
    )


def sum_whole_blocks[T](values: T, size: int) -> tuple[T, Float[Array, "B M"]]:
    """Return what `sum_blocks` finds in rows that consist of whole blocks: without a gather, whose gradient is slow."""

    def summed(x: Array) -> Array:
        return jnp.sum(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 2, dtype=jnp.float32)

    sums = jax.tree.map(summed, values)
    return sums, jnp.full(jax.tree.leaves(sums)[0].shape[:2], size, jnp.float32)


def attend_blocks(
    q: Float[Array, "B T H K"],
    pooled: Pooled,
    ids: Int[Array, "B T"],
    times: Int[Array, "B T"],
    size: int,
    *,
    causal: bool,
    alone: bool = False,
    axis: SeqAxis | None = None,
) -> Float[Array, "B T H K"]:
    """Return attention to the pooled blocks of the document; if causal to those before each query's own, 0 if none.

    `alone` promises rows of one document, whose blocks are known when a program is compiled. `axis` splits the queries.
    """
    before = masks.FULL & BlocksBefore(size)
    if causal and alone and axis is None:
        return attention(q, pooled.k, pooled.v, before)
    if causal and alone and axis is not None:
        runs = query_runs(axis.size, balanced=False)
        if explain_split(q, pooled.k, before, runs) is None:
            device = lax.axis_index(axis.name)
            return split_attention(q, pooled.k, pooled.v, before, runs=runs, device=device)
    mask = masks.documents(ids, pooled.ids)
    if causal:
        mask &= masks.CAUSAL & masks.positions(times // size - 1, pooled.numbers)
    return attention(q, pooled.k, pooled.v, mask)


class Queries(NamedTuple):
    """Queries that look for blocks.

    Attributes:
      q: one a token, or one a block.
      ids: of their documents, 0 for none.
      numbers: of the blocks that they stand in; they see earlier ones only. None if they see all of the document.
    """

    q: Float[Array, "B T H K"]
    ids: Int[Array, "B T"]
    numbers: Int[Array, "B T"] | None

    @property
    def places(self) -> Places:
        """Documents, and numbers of the first blocks that they do not see."""
        return Places(self.ids, jnp.full_like(self.ids, NEVER) if self.numbers is None else self.numbers)


def choose_blocks(queries: Queries, pooled: Pooled, top_k: int) -> Int[Array, "B T G n"]:
    """Return the numbers of the `top_k` blocks that heads of a group attend to most; -1 where there are fewer.

    There is no gradient.
    """
    best = select.choose_blocks(queries.q, pooled.keys, queries.places, pooled.places, count=top_k)
    found = jnp.take_along_axis(pooled.numbers[:, None, None], jnp.maximum(best, 0), -1)
    return jnp.where(best >= 0, found, -1)
