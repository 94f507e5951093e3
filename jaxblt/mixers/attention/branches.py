"""The three branches of sparse attention, for rows that are whole, split along the sequence, or meet a cache."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.mixers.attention.cached import near_keys
from jaxblt.mixers.attention.kv_cache import Cache, Meeting, emptied, put
from jaxblt.mixers.attention.pooled import (
    NEVER,
    Pooled,
    Queries,
    Sums,
    at_ends,
    attend_blocks,
    choose_blocks,
    find_all_ends,
    find_ends,
    sum_blocks,
    sum_whole_blocks,
    take_tokens,
)
from jaxblt.mixers.attention.predictor import Asked, Keys, imitate
from jaxblt.parallel.attention.by_time import Seen, document_times
from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import Chosen, attention, attention_with_lse, masks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.rules import Interval
from pallas_kernels.runtime import count_below, is_symbolic

KERNEL_GRAIN = 64
"""Kernels for windows take multiples of so many tokens."""

SAMPLED = 16
"""Queries of a device's row, evenly apart, for which dense attention is computed beside what is chosen."""


class Branches(NamedTuple):
    """Sizes of the branches: tokens of a block, blocks that a token chooses, and steps of the window; its direction.

    `alone` says that each row is one document without holes, so that indices say where its blocks lie.
    """

    block: int
    top_k: int
    window: int
    causal: bool = True
    alone: bool = False

    @property
    def direction(self) -> Mask:
        """The mask that both of the branches over tokens have."""
        return masks.CAUSAL if self.causal else masks.FULL

    def chosen(self, lists: Int[Array, "B T G n"]) -> Chosen:
        """Return the rule of chosen blocks."""
        return Chosen(lists.swapaxes(1, 2), self.block)


class Stream(NamedTuple):
    """Tokens of a call without a state, position encoding applied.

    Attributes:
      q, k, v: queries, keys and values.
      learned: queries [B, T, H, K] and keys [B, T, G, K] of a predictor, or None.
      gates: of the three branches.
      ids: s > 0 a token of document s, -s a hole, 0 nothing.
      times: steps since the start of the document.
    """

    q: Any
    k: Any
    v: Any
    learned: Any
    gates: Any
    ids: Any
    times: Any

    @property
    def shown(self) -> Int[Array, "B T"]:
        """Documents, 0 where there is no token."""
        return jnp.maximum(self.ids, 0)

    @property
    def asks(self) -> Float[Array, "B T H K"]:
        """Queries that choose blocks: a predictor's if there is one."""
        return self.q if self.learned is None else self.learned[0]

    @property
    def pooled_values(self) -> tuple[Any, Any, Any]:
        """Arrays that blocks hold sums of."""
        return self.k, self.v, None if self.learned is None else self.learned[1]


class Grid(NamedTuple):
    """The blocks of a device's rows.

    Attributes:
      block: of each token in hand, counted along the whole row; -1 for holes and where nothing is.
      wanted: the same of each block that is pooled, rising; `NEVER` for none.
      first, ends: index of each block's first and last token; the first token in hand has 0.
    """

    block: Int[Array, "B T"]
    wanted: Int[Array, "B M"]
    first: Int[Array, "B M"]
    ends: Int[Array, "B M"]

    def sum[T](self, values: T, size: int, axis: SeqAxis | None) -> tuple[T, Float[Array, "B M"]]:
        """Return sums of values over the tokens of each block, and how many there are; on all devices."""
        sums = sum_blocks(values, self.block, self.wanted, self.ends, size)
        return sums if axis is None else lax.psum(sums, axis.name)


def attend_tokens(
    branches: Branches, axis: SeqAxis | None, learns: bool, given: tuple[Stream, Any], _: Any, __: Any
) -> tuple[Float[Array, "B T H K"], Int[Array, "B T G n"], Float[Array, "B asked G 2"] | None]:
    """Return the gated outputs of a device's tokens, the blocks that they chose, and a predictor's losses.

    Args:
      branches: sizes.
      axis: splits the tokens, or None.
      learns: measure the losses of a predictor; else they are None.
      given: the tokens, and lists to take instead of those that they would choose, or None.
    """
    stream, lists = given
    grid, pooled = _pool(branches, axis, stream)
    options = {"causal": branches.causal, "alone": branches.alone, "axis": axis}
    by_blocks = attend_blocks(stream.q, pooled, stream.shown, stream.times, branches.block, **options)
    if lists is None:
        lists = _choose(branches, axis, stream, grid, pooled)
    losses = _imitate(branches, axis, stream, grid, pooled) if learns else None
    own = Seen(stream.k, stream.v, stream.shown, stream.times)
    if branches.alone and axis is None:
        others = _attend_alone(branches, stream.q, own, lists)
    else:
        others = _attend_documents(branches, axis, grid, stream.q, own, lists)
    return _gate(stream.gates, by_blocks, *others), lists, losses


def _pool(branches: Branches, axis: SeqAxis | None, stream: Stream) -> tuple[Grid, Pooled]:
    """Return the blocks of all documents; split tokens are summed over the devices, which all hold the result."""
    ids, times, size, length = stream.ids, stream.times, branches.block, stream.q.shape[1]
    first: Any = 0
    if axis is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True)
        times, first = document_times(ids, None), lax.axis_index(axis.name) * length
    document = jnp.abs(ids)
    ends = find_ends(times, document > 0, size) if branches.causal else find_all_ends(times, document, size)
    blocks = jnp.cumsum(times % size == 0, 1, dtype=jnp.int32)
    wanted = jnp.where(ends < NEVER, at_ends(blocks, ends), NEVER)
    own = blocks if axis is None else lax.dynamic_slice_in_dim(blocks, first, length, 1)
    last = at_ends(times, ends)
    grid = Grid(jnp.where(stream.ids > 0, own, -1), wanted, ends - first - last % size, ends - first)
    whole = axis is None and not is_symbolic(length) and length % size == 0
    if whole and branches.alone and branches.causal:
        values, tokens = sum_whole_blocks(stream.pooled_values, size)
    else:
        values, tokens = grid.sum(stream.pooled_values, size, axis)
    return grid, Sums(*values, tokens).pool(at_ends(document, ends), last // size, stream.k.dtype)


def _choose(
    branches: Branches, axis: SeqAxis | None, stream: Stream, grid: Grid, pooled: Pooled
) -> Int[Array, "B T G n"]:
    """Return the blocks that each token chooses; if not causal all tokens of a block choose by the sum of queries."""
    if branches.causal:
        queries = Queries(stream.asks, stream.shown, stream.times // branches.block)
        return choose_blocks(queries, pooled, branches.top_k)
    q, tokens = grid.sum(lax.stop_gradient(stream.asks), branches.block, axis)
    q = (q / jnp.maximum(tokens, 1)[..., None, None]).astype(stream.k.dtype)
    lists = choose_blocks(Queries(q, pooled.ids, None), pooled, branches.top_k)
    place = jax.vmap(partial(count_below, equal=False))(grid.wanted, grid.block)
    place = jnp.minimum(place, grid.wanted.shape[1] - 1)
    found = jnp.take_along_axis(grid.wanted, place, 1) == grid.block
    lists = jnp.take_along_axis(lists, place[..., None, None], 1)
    return jnp.where(found[..., None, None], lists, -1)


def _imitate(
    branches: Branches, axis: SeqAxis | None, stream: Stream, grid: Grid, pooled: Pooled
) -> Float[Array, "B asked G 2"]:
    """Return the losses of the predictor at a sample of a device's tokens."""
    sample = _asking(stream)

    def take(x: Array) -> Array:
        return jnp.take_along_axis(x, sample[(..., *[None] * (x.ndim - 2))], 1)

    asked = Asked(*map(take, (stream.q, stream.asks, stream.shown, stream.times)))
    keys = Keys(stream.k, stream.shown, stream.times, grid.first, grid.ends)
    return imitate(asked, keys, pooled, branches.block, axis, causal=branches.causal)


def _asking(stream: Stream) -> Int[Array, "B asked"]:
    """Return the indices of tokens from which a predictor learns: `SAMPLED` even ones, and as many sharp ones.

    The longest queries attend most sharply. Few tokens of a long row may look for anything, and an even sample would
    miss them.
    """
    size, length = stream.ids.shape
    even = jnp.broadcast_to(_sample(length)[None], (size, min(SAMPLED, length)))
    long = jnp.max(jnp.sum(jnp.square(stream.q.astype(jnp.float32)), -1), -1)
    long = jnp.where(stream.ids > 0, lax.stop_gradient(long), -1)
    return jnp.concatenate([even, lax.top_k(long, even.shape[1])[1]], 1)


def _sample(length: int) -> np.ndarray:
    """Return the indices of `SAMPLED` tokens, or of all if there are fewer, evenly from the first to the last."""
    return np.linspace(0, length - 1, min(SAMPLED, length)).astype(int)


def _attend_alone(branches: Branches, q: Array, own: Seen, lists: Array) -> tuple[Array, Array]:
    """Return attention to chosen blocks and to the window in rows of one document."""
    both = branches.chosen(lists), masks.window(branches.window)
    return tuple(attention(q, own.k, own.v, branches.direction & each) for each in both)  # pyright: ignore


def _attend_documents(
    branches: Branches, axis: SeqAxis | None, grid: Grid, q: Array, own: Seen, lists: Array
) -> tuple[Array, Array]:
    """Return attention to chosen blocks and to the window.

    Chosen blocks may lie anywhere in the row, so devices that split it gather its keys.
    """
    first, whole = jnp.zeros((), jnp.int32), own
    if axis is not None:
        first = lax.axis_index(axis.name) * q.shape[1]
        whole = jax.tree.map(lambda x: lax.all_gather(x, axis.name, axis=1, tiled=True), own)
    window = _attend_window(branches, first, q, own, whole)
    if branches.alone:
        return attention(q, whole.k, whole.v, masks.FULL & branches.chosen(lists)), window
    grid = grid._replace(first=grid.first + first, ends=grid.ends + first)
    blocks = _by_block(branches, grid, whole)
    # Number a document's blocks along the row: those before it are what ended before its first token.
    index = first + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    before = jax.vmap(count_below)(grid.ends, index - own.times)
    lists = jnp.where(lists < 0, -1, lists + before[..., None, None])
    chosen = masks.documents(own.ids, blocks.ids) & branches.chosen(lists)
    return attention(q, blocks.k, blocks.v, chosen), window


def _attend_window(branches: Branches, first: Array, q: Array, own: Seen, whole: Seen) -> Array:
    """Return attention to the window, of which keys of a whole row hold what lies beyond the first and last query."""
    length, band = q.shape[1], branches.direction & masks.window(branches.window)
    if whole is own:
        return attention(q, own.k, own.v, band & masks.documents(own.ids))
    # Pad the queries as far as keys reach: then indices tell distances, which kernels for windows compare.
    reach = min(-(-(branches.window - 1) // KERNEL_GRAIN) * KERNEL_GRAIN, whole.ids.shape[1])
    sides = (reach, 0 if branches.causal else reach)

    def pad(x: Array) -> Array:
        return jnp.pad(x, [(0, 0), sides, *[(0, 0)] * (x.ndim - 2)])

    near = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(pad(x), first, length + sum(sides), 1), whole)
    # Give padding the ids of its keys: kernels for packed rows take queries and keys of the same ids.
    return attention(pad(q), near.k, near.v, band & masks.documents(near.ids))[:, reach : reach + length]


def _by_block(branches: Branches, grid: Grid, own: Seen) -> Seen:
    """Return keys in blocks of one size, whose numbers are their places; where a block is short there is no token."""
    place = grid.first[..., None] + jnp.arange(branches.block, dtype=jnp.int32)[None, None]
    there = (place <= grid.ends[..., None]) & (grid.wanted < NEVER)[..., None]
    return jax.tree.map(lambda x: take_tokens(x, place, there), own)


def _gate(gates: Float[Array, "B T H 3"], *outputs: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    gated = (gates[..., i, None] * o.astype(jnp.float32) for i, o in enumerate(outputs))
    return sum(gated, start=jnp.zeros((), jnp.float32))


def kept_share(branches: Branches, stream: Stream, lists: Int[Array, "B T G n"]) -> Float[Array, "B"]:
    """Return the share of dense attention on chosen blocks and window: the mean over heads and `SAMPLED` queries."""
    sample = _sample(stream.ids.shape[1])
    q, lists, ids, times = (x[:, sample] for x in (stream.q, lists, stream.shown, stream.times))
    mask = branches.direction & masks.positions(times, stream.times)
    mask &= masks.documents(ids, stream.shown)
    reach = branches.window - 1
    kept = mask & (branches.chosen(lists) | Interval(reach, 0 if branches.causal else reach))
    some, every = (attention_with_lse(q, stream.k, stream.v, each)[1] for each in (kept, mask))
    tokens = (ids > 0)[:, None].astype(jnp.float32)
    share = jnp.sum(jnp.exp(some - every) * tokens, (1, 2)) / (
        some.shape[1] * jnp.maximum(tokens.sum((1, 2)), 1)
    )
    return lax.stop_gradient(share)


def attend_cached(
    branches: Branches,
    q: Float[Array, "B T H K"],
    learned: tuple[Array, Array] | None,
    gates: Float[Array, "B T H 3"],
    met: Meeting,
    documents: Int[Array, "B T"],
    sums: Sums,
) -> tuple[Float[Array, "B T H K"], Cache, Sums]:
    """Return the gated outputs of a call's tokens, and the cache and the sums of blocks after them.

    `documents` are as the ids of the tokens, which they are of holes too. `learned` are a predictor's queries and keys.
    """
    new, size = met.new, branches.block
    values = (new.k, new.v, None if learned is None else learned[1])
    pooled = _known(met, sums, size).join(_completed(met, values, documents, sums, size))
    by_blocks = attend_blocks(q, pooled, new.ids, new.times, size, causal=True)
    asks = q if learned is None else learned[0]
    lists = choose_blocks(Queries(asks, new.ids, new.times // size), pooled, branches.top_k)
    after = put(emptied(met.cache, met.fresh), new)
    k, v, mask = near_keys(Plan(route="whole"), q, met.cache, after, new, new.ids)
    o = [attention(q, k, v, mask & other) for other in _others(branches, lists)]
    return _gate(gates, by_blocks, *o), after, _added(met, values, documents, sums, size)


def _others(branches: Branches, lists: Array) -> tuple[Mask, Mask]:
    return masks.FULL & branches.chosen(lists), masks.window(branches.window)


def _known(met: Meeting, sums: Sums, size: int) -> Pooled:
    """Return the blocks that were complete before the call, of the document that continues."""
    numbers = jnp.broadcast_to(jnp.arange(sums.tokens.shape[1], dtype=jnp.int32)[None], sums.tokens.shape)
    complete = (numbers + 1) * size <= met.time[:, None]
    return sums.pool(complete.astype(jnp.int32), numbers, met.new.k.dtype)


def _completed(
    met: Meeting, values: tuple[Any, Any, Any], documents: Int[Array, "B T"], sums: Sums, size: int
) -> Pooled:
    """Return the blocks that the call completes, of all its documents; the first may have begun before."""
    new = met.new
    ends = find_ends(new.times, documents > 0, size)
    document = at_ends(documents, ends)
    numbers = at_ends(new.times, ends) // size
    wanted = jnp.where(ends < NEVER, document, -1)
    summed, tokens = sum_blocks(values, new.ids, wanted, ends, size)
    begun = document == 1
    place = jnp.minimum(numbers, sums.tokens.shape[1] - 1)

    def join(old: Array, x: Array) -> Array:
        lead = (..., *(None,) * (x.ndim - 2))
        return x + jnp.where(begun[lead], jnp.take_along_axis(old, place[lead], 1), 0)

    return jax.tree.map(join, sums, Sums(*summed, tokens)).pool(document, numbers, new.k.dtype)


def _added(
    met: Meeting, values: tuple[Any, Any, Any], documents: Int[Array, "B T"], sums: Sums, size: int
) -> Sums:
    """Return the sums of each row's last document after the call; rows without a token keep every bit."""
    new, blocks = met.new, sums.tokens.shape[1]
    last = jnp.max(documents, 1, keepdims=True)
    place = jnp.where((new.ids > 0) & (new.ids == last), new.times // size, blocks)

    def add(old: Array, x: Array) -> Array:
        old = jnp.where(met.fresh.reshape(-1, *(1,) * (old.ndim - 1)), 0, old)
        return jax.vmap(lambda o, i, x: o.at[i].add(x, mode="drop"))(old, place, x.astype(jnp.float32))

    return jax.tree.map(add, sums, Sums(*values, jnp.ones(new.ids.shape)))
