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
      ids: of their documents.
      numbers: of the blocks in their documents.
    """

    k: Float[Array, "B M G K"]
    v: Float[Array, "B M G K"]
    ids: Int[Array, "B M"]
    numbers: Int[Array, "B M"]

    def join(self, other: "Pooled") -> "Pooled":
        """Return the blocks of both."""
        return Pooled(*(jnp.concatenate(pair, 1) for pair in zip(self, other, strict=True)))


@flax.struct.dataclass
class Sums:
    """Sums of keys and of values over the tokens of blocks, fp32, and how many tokens there are."""

    k: Float[Array, "B M G K"]
    v: Float[Array, "B M G K"]
    tokens: Float[Array, "B M"]

    __repr__ = show

    def pool(self, ids: Int[Array, "B M"], numbers: Int[Array, "B M"], dtype: jnp.dtype) -> Pooled:
        """Return the means of blocks of documents `ids`; a block without tokens is not there."""
        count = jnp.maximum(self.tokens, 1)[..., None, None]
        k, v = ((x / count).astype(dtype) for x in (self.k, self.v))
        return Pooled(k, v, jnp.where(self.tokens > 0, ids, 0), numbers)


def find_ends(times: Int[Array, "B T"], live: Bool[Array, "B T"], size: int) -> Int[Array, "B M"]:
    """Return the indices of tokens that complete a block, in order, then `NEVER`; room for all there may be."""
    length = times.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)[None]
    ends = jnp.where(live & ((times + 1) % size == 0), index, NEVER)
    return jnp.sort(ends, 1)[:, : -(-length // size)]


def at_ends(x: Int[Array, "B T"], ends: Int[Array, "B M"]) -> Int[Array, "B M"]:
    """Return numbers of the tokens that complete blocks; 0 where there is no block."""
    found = jnp.take_along_axis(x, jnp.minimum(ends, x.shape[1] - 1), 1)
    return jnp.where(ends < NEVER, found, 0)


def sum_blocks(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    counted: Int[Array, "B T"],
    wanted: Int[Array, "B M"],
    ends: Int[Array, "B M"],
    size: int,
) -> Sums:
    """Sum the `size` tokens up to each end, of those tokens whose number in `counted` is the block's in `wanted`.

    Ends may lie outside of the tokens in hand, which are then a part of the block.
    """
    place = ends[..., None] + jnp.arange(1 - size, 1, dtype=jnp.int32)[None, None]
    inside = (place >= 0) & (place < k.shape[1])
    place = jnp.clip(place, 0, k.shape[1] - 1).reshape(ends.shape[0], ends.shape[1] * size)
    there = jnp.take_along_axis(counted, place, 1).reshape(inside.shape) == wanted[..., None]
    there = (inside & there).astype(jnp.float32)

    def summed(x: Array) -> Array:
        tokens = jnp.take_along_axis(x, place[..., None, None], 1).reshape(*inside.shape, *x.shape[2:])
        return jnp.einsum("bmsgk,bms->bmgk", tokens.astype(jnp.float32), there, precision="highest")

    return Sums(summed(k), summed(v), jnp.sum(there, -1))


def attend_blocks(
    q: Float[Array, "B T H K"], pooled: Pooled, ids: Int[Array, "B T"], times: Int[Array, "B T"], size: int
) -> Float[Array, "B T H K"]:
    """Return attention to the pooled blocks before each query's own; 0 in a document's first block."""
    mask = masks.CAUSAL & masks.positions(times // size - 1, pooled.numbers)
    return attention(q, pooled.k, pooled.v, mask & masks.documents(ids, pooled.ids))


def choose_blocks(
    q: Float[Array, "B T H K"],
    pooled: Pooled,
    ids: Int[Array, "B T"],
    times: Int[Array, "B T"],
    size: int,
    top_k: int,
) -> Int[Array, "B T G n"]:
    """Return the numbers of the `top_k` blocks that heads of a group attend to most; -1 where there are fewer.

    Shares of attention to pooled blocks are summed over the query heads of a key head (2502.11089, eq. 10). They are
    made in strips of `STRIP` queries. There is no gradient: attention to the pooled blocks has it.
    """
    (batch, length, heads, width), groups = q.shape, pooled.k.shape[2]
    strips = 1 if is_symbolic(length) else -(-length // STRIP)
    size_of = -(-length // strips)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, strips * size_of - length), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, strips, size_of, *x.shape[2:]), 1, 0)

    def choose(strip: tuple[Array, Array, Array]) -> Array:
        q, ids, times = strip
        q = q.reshape(batch, size_of, groups, heads // groups, width)
        scores = jnp.einsum("btgrk,bmgk->bgrtm", q, pooled.k, preferred_element_type=jnp.float32)
        seen = (ids[:, :, None] == pooled.ids[:, None]) & (ids > 0)[:, :, None]
        seen = (seen & (pooled.numbers[:, None] < times[:, :, None] // size))[:, None, None]
        shares = jax.nn.softmax(jnp.where(seen, scores * width**-0.5, -1e30), -1)
        shares = jnp.sum(jnp.where(seen, shares, -1.0), 2)
        # Leave room behind the blocks, as there may be fewer than are chosen.
        shares = jnp.pad(shares, ((0, 0), (0, 0), (0, 0), (0, top_k)), constant_values=-1.0)
        found, best = lax.top_k(shares, top_k)
        numbers = jnp.take_along_axis(numbers_of, best, -1)
        return jnp.where(found >= 0, numbers, -1).swapaxes(1, 2)

    q, pooled = lax.stop_gradient((q, pooled))
    numbers_of = jnp.pad(pooled.numbers, ((0, 0), (0, top_k)))[:, None, None]
    chosen = lax.map(choose, (cut(q), cut(ids), cut(times)))
    return jnp.moveaxis(chosen, 0, 1).reshape(batch, strips * size_of, groups, top_k)[:, :length]
