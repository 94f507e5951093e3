"""Pooled blocks of keys: the mean of each block of a document that is complete, and the blocks a token chooses by them.

A block is `size` steps of a document, counted from its start. Holes count as steps and hold nothing. Blocks lie on the
document's own grid, so they are the same in packed rows, alone, and in a stream.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxblt.show import show
from pallas_kernels.attention import attention, masks
from pallas_kernels.runtime import is_symbolic

NEVER = 1 << 30
"""Index of the end of a block that is not there."""

STRIP = 256
"""Queries whose scores of all blocks are held at a time."""


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
    inside = (place >= 0) & (place < length)
    place = jnp.clip(place, 0, length - 1).reshape(ends.shape[0], ends.shape[1] * size)
    there = jnp.take_along_axis(counted, place, 1).reshape(inside.shape) == wanted[..., None]
    there = (inside & there).astype(jnp.float32)

    def summed(x: Array) -> Array:
        tokens = jnp.take_along_axis(x, place[..., None, None], 1).reshape(*inside.shape, *x.shape[2:])
        return jnp.einsum("bmsgk,bms->bmgk", tokens.astype(jnp.float32), there, precision="highest")

    return jax.tree.map(summed, values), jnp.sum(there, -1)


def attend_blocks(
    q: Float[Array, "B T H K"],
    pooled: Pooled,
    ids: Int[Array, "B T"],
    times: Int[Array, "B T"],
    size: int,
    *,
    causal: bool,
) -> Float[Array, "B T H K"]:
    """Return attention to the pooled blocks of the document; if causal to those before each query's own, 0 if none."""
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

    def see(self, pooled: Pooled) -> Bool[Array, "B T M"]:
        """Return which blocks each may choose."""
        seen = (self.ids[:, :, None] == pooled.ids[:, None]) & (self.ids > 0)[:, :, None]
        if self.numbers is None:
            return seen
        return seen & (pooled.numbers[:, None] < self.numbers[:, :, None])


def score_blocks(q: Float[Array, "B T H K"], keys: Float[Array, "B M G K"]) -> Float[Array, "B G R T M"]:
    """Return the products of the R query heads of each key head with keys of blocks, in fp32, over the root of K."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, keys.shape[2], heads // keys.shape[2], width)
    return jnp.einsum("btgrk,bmgk->bgrtm", q, keys, preferred_element_type=jnp.float32) * width**-0.5


def choose_blocks(queries: Queries, pooled: Pooled, top_k: int) -> Int[Array, "B T G n"]:
    """Return the numbers of the `top_k` blocks that heads of a group attend to most; -1 where there are fewer.

    Shares of attention to the blocks' keys are summed over the query heads of a key head (2502.11089, eq. 10).
    They are made in strips of `STRIP` queries. There is no gradient.
    """
    batch, length = queries.ids.shape
    strips = 1 if is_symbolic(length) else -(-length // STRIP)
    size_of = -(-length // strips)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, strips * size_of - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, strips, size_of, *x.shape[2:]), 1, 0)

    def choose(strip: Queries) -> Array:
        seen = strip.see(pooled)[:, None, None]
        shares = jax.nn.softmax(jnp.where(seen, score_blocks(strip.q, pooled.keys), -1e30), -1)
        shares = jnp.sum(jnp.where(seen, shares, -1.0), 2)
        # Leave room behind the blocks, as there may be fewer than are chosen.
        shares = jnp.pad(shares, ((0, 0), (0, 0), (0, 0), (0, top_k)), constant_values=-1.0)
        found, best = lax.top_k(shares, top_k)
        numbers = jnp.take_along_axis(numbers_of, best, -1)
        return jnp.where(found >= 0, numbers, -1).swapaxes(1, 2)

    queries, pooled = lax.stop_gradient((queries, pooled))
    numbers_of = jnp.pad(pooled.numbers, ((0, 0), (0, top_k)))[:, None, None]
    chosen = lax.map(choose, jax.tree.map(cut, queries))
    groups = pooled.k.shape[2]
    return jnp.moveaxis(chosen, 0, 1).reshape(batch, strips * size_of, groups, top_k)[:, :length]
