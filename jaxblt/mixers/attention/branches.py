"""The three branches of sparse attention, for rows that are whole, split along the sequence, or meet a cache."""

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
    Sums,
    at_ends,
    attend_blocks,
    choose_blocks,
    find_ends,
    sum_blocks,
)
from jaxblt.parallel.attention.by_time import Seen, document_times
from jaxblt.parallel.attention.merge import ring_pass
from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.sequence import SeqAxis
from pallas_kernels.attention import Chosen, Partial, attention, attention_with_lse, masks, merge_partials
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.rules import Interval

SAMPLED = 16
"""Queries of a row for which the share that is kept is measured against dense attention."""


class Branches(NamedTuple):
    """Sizes of the branches: tokens of a block, blocks that a token chooses, and steps of the window."""

    block: int
    top_k: int
    window: int

    def chosen(self, lists: Int[Array, "B T G n"]) -> Chosen:
        """Return the rule of chosen blocks."""
        return Chosen(lists.swapaxes(1, 2), self.block)


class Stream(NamedTuple):
    """Tokens of a call without a state, position encoding applied.

    Attributes:
      q, k, v: queries, keys and values.
      gates: of the three branches.
      ids: s > 0 a token of document s, -s a hole, 0 nothing.
      times: steps since the start of the document.
    """

    q: Any
    k: Any
    v: Any
    gates: Any
    ids: Any
    times: Any


def attend_tokens(
    branches: Branches, axis: SeqAxis | None, given: tuple[Stream, Any], _: Any, __: Any
) -> tuple[Float[Array, "B T H K"], Int[Array, "B T G n"]]:
    """Return the gated outputs of a device's tokens and the blocks that they chose, inside an island.

    Args:
      branches: sizes.
      axis: splits the tokens, or None.
      given: the tokens, and lists to take instead of those that they would choose, or None.
    """
    stream, lists = given
    shown = jnp.maximum(stream.ids, 0)
    pooled = _pool(branches, axis, stream)
    by_blocks = attend_blocks(stream.q, pooled, shown, stream.times, branches.block)
    if lists is None:
        lists = choose_blocks(stream.q, pooled, shown, stream.times, branches.block, branches.top_k)
    own = Seen(stream.k, stream.v, shown, stream.times)
    attend = _attend_whole if axis is None else _attend_split
    return _gate(stream.gates, by_blocks, *attend(branches, stream.q, own, lists)), lists


def _pool(branches: Branches, axis: SeqAxis | None, stream: Stream) -> Pooled:
    """Return the blocks of all documents; split tokens are summed over the devices, which all hold the result."""
    ids, times, size = stream.ids, stream.times, branches.block
    if axis is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True)
        times = document_times(ids, None)
    document = jnp.abs(ids)
    ends = find_ends(times, document > 0, size)
    wanted = jnp.where(ends < NEVER, at_ends(document, ends), -1)
    first = 0 if axis is None else lax.axis_index(axis.name) * stream.q.shape[1]
    sums = sum_blocks(stream.k, stream.v, stream.ids, wanted, ends - first, size)
    if axis is not None:
        sums = lax.psum(sums, axis.name)
    return sums.pool(jnp.maximum(wanted, 0), at_ends(times, ends) // size, stream.k.dtype)


def _attend_whole(branches: Branches, q: Array, own: Seen, lists: Array) -> tuple[Array, Array]:
    """Return attention to chosen blocks and to the window."""
    mask = masks.CAUSAL & masks.documents(own.ids)
    chosen = mask & masks.positions(own.times, own.times) & branches.chosen(lists)
    return attention(q, own.k, own.v, chosen), attention(
        q, own.k, own.v, mask & masks.window(branches.window)
    )


def _attend_split(branches: Branches, q: Array, own: Seen, lists: Array) -> tuple[Array, Array]:
    """Return the same by one ring pass for both, in fp32."""

    def attend(held: Seen) -> list[Partial]:
        mask = masks.CAUSAL & masks.positions(own.times, held.times) & masks.documents(own.ids, held.ids)
        both = (mask & branches.chosen(lists), mask & masks.window(branches.window))
        return [Partial(*attention_with_lse(q, held.k, held.v, one)) for one in both]

    def visit(merged: list[Partial], held: Seen) -> list[Partial]:
        return [merge_partials(*pair) for pair in zip(merged, attend(held), strict=True)]

    chosen, window = ring_pass(visit, attend(own), own)
    return chosen.o, window.o


def _gate(gates: Float[Array, "B T H 3"], *outputs: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
    gated = (gates[..., i, None] * o.astype(jnp.float32) for i, o in enumerate(outputs))
    return sum(gated, start=jnp.zeros((), jnp.float32))


def kept_share(branches: Branches, stream: Stream, lists: Int[Array, "B T G n"]) -> Float[Array, "B"]:
    """Return the share of dense attention on chosen blocks and window: the mean over heads and `SAMPLED` queries."""
    length = stream.q.shape[1]
    sample = np.linspace(0, length - 1, min(SAMPLED, length)).astype(int)
    q, lists, ids, times = (x[:, sample] for x in (stream.q, lists, jnp.maximum(stream.ids, 0), stream.times))
    mask = masks.CAUSAL & masks.positions(times, stream.times)
    mask &= masks.documents(ids, jnp.maximum(stream.ids, 0))
    kept = mask & (branches.chosen(lists) | Interval(branches.window - 1, 0))
    some, every = (attention_with_lse(q, stream.k, stream.v, each)[1] for each in (kept, mask))
    tokens = (ids > 0)[:, None].astype(jnp.float32)
    share = jnp.sum(jnp.exp(some - every) * tokens, (1, 2)) / (
        some.shape[1] * jnp.maximum(tokens.sum((1, 2)), 1)
    )
    return lax.stop_gradient(share)


def attend_cached(
    branches: Branches,
    q: Float[Array, "B T H K"],
    gates: Float[Array, "B T H 3"],
    met: Meeting,
    documents: Int[Array, "B T"],
    sums: Sums,
) -> tuple[Float[Array, "B T H K"], Cache, Sums]:
    """Return the gated outputs of a call's tokens, and the cache and the sums of blocks after them.

    `documents` are as the ids of the tokens, which they are of holes too.
    """
    new, size = met.new, branches.block
    pooled = _known(met, sums, size).join(_completed(met, documents, sums, size))
    by_blocks = attend_blocks(q, pooled, new.ids, new.times, size)
    lists = choose_blocks(q, pooled, new.ids, new.times, size, branches.top_k)
    after = put(emptied(met.cache, met.fresh), new)
    k, v, mask = near_keys(Plan(route="whole"), q, met.cache, after, new, new.ids)
    o = [attention(q, k, v, mask & other) for other in _others(branches, lists)]
    return _gate(gates, by_blocks, *o), after, _added(met, documents, sums, size)


def _others(branches: Branches, lists: Array) -> tuple[Mask, Mask]:
    return masks.FULL & branches.chosen(lists), masks.window(branches.window)


def _known(met: Meeting, sums: Sums, size: int) -> Pooled:
    """Return the blocks that were complete before the call, of the document that continues."""
    numbers = jnp.broadcast_to(jnp.arange(sums.tokens.shape[1], dtype=jnp.int32)[None], sums.tokens.shape)
    complete = (numbers + 1) * size <= met.time[:, None]
    return sums.pool(complete.astype(jnp.int32), numbers, met.new.k.dtype)


def _completed(met: Meeting, documents: Int[Array, "B T"], sums: Sums, size: int) -> Pooled:
    """Return the blocks that the call completes, of all its documents; the first may have begun before."""
    new = met.new
    ends = find_ends(new.times, documents > 0, size)
    document = at_ends(documents, ends)
    numbers = at_ends(new.times, ends) // size
    found = sum_blocks(new.k, new.v, new.ids, jnp.where(ends < NEVER, document, -1), ends, size)
    begun = (document == 1)[..., None, None]
    place = jnp.minimum(numbers, sums.tokens.shape[1] - 1)
    k, v = (
        x + jnp.where(begun, jnp.take_along_axis(old, place[..., None, None], 1), 0)
        for x, old in ((found.k, sums.k), (found.v, sums.v))
    )
    count = found.tokens + jnp.where(begun[..., 0, 0], jnp.take_along_axis(sums.tokens, place, 1), 0)
    return Sums(k, v, count).pool(document, numbers, new.k.dtype)


def _added(met: Meeting, documents: Int[Array, "B T"], sums: Sums, size: int) -> Sums:
    """Return the sums of each row's last document after the call; rows without a token keep every bit."""
    new, blocks = met.new, sums.tokens.shape[1]
    last = jnp.max(documents, 1, keepdims=True)
    place = jnp.where((new.ids > 0) & (new.ids == last), new.times // size, blocks)

    def add(old: Array, x: Array) -> Array:
        old = jnp.where(met.fresh.reshape(-1, *(1,) * (old.ndim - 1)), 0, old)
        return jax.vmap(lambda o, i, x: o.at[i].add(x, mode="drop"))(old, place, x.astype(jnp.float32))

    return Sums(add(sums.k, new.k), add(sums.v, new.v), add(sums.tokens, jnp.ones(new.ids.shape)))
