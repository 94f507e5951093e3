"""Attention of a call's tokens to a cache and to each other: on one device, or with tokens or cache split over `seq`.

A cache that bounds its documents lies in equal runs of slots on the devices of the sequence; the ring of a window is
whole on all of them. Many more tokens than it has slots, not split, are put behind what it holds, in the order of
time, so that blocks of scores out of the window are not visited. Where a mask would be too large for an array, the
call's own tokens and the cache are two calls of partial attention, by lengths instead of positions. A few tokens are
whole on all devices too: each device attends to its own slots, and the results merge by log-sum-exp. The stretches of
many tokens attend to each other as in training (a ring pass, or a halo if there is a window) and then to what the cache
held before, which is skipped as long as it held nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.attention.kv_cache import (
    AttentionState,
    Cache,
    Entries,
    check_slots,
    emptied,
    entries,
    put,
)
from jaxblt.mixers.driver.base import Tokens
from jaxblt.parallel.attention.merge import balanced_ring, merge_devices, ring_pass
from jaxblt.parallel.attention.ring import Ring
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.attention.window import Band, partial_band_attention
from jaxblt.parallel.content import content_first
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.layout import CONTIGUOUS
from jaxblt.parallel.sequence import SEQ_AXIS, SeqAxis, over_sequence, seq_axis
from pallas_kernels.attention import (
    Partial,
    attention,
    attention_with_lse,
    masks,
    merge_partials,
    partial_attention,
)
from pallas_kernels.attention.arguments import zero_where_not
from pallas_kernels.attention.cudnn import LARGEST_MASK
from pallas_kernels.attention.masks import Mask

MANY_WINDOWS = 4
"""Windows of tokens in a call from which they are put behind the ring. Its slots are queries too then: where a kernel
takes the mask as an array and visits all of it, a call has at most 1.25 times the scores."""

NEVER = np.iinfo(np.int32).max
"""Time of a slot that the causal mask hides from every token."""

Heads = tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]


class Seen(NamedTuple):
    """Keys and values with the documents and times that decide who sees them."""

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]
    ids: Int[Array, "B S"]
    times: Int[Array, "B S"]


@dataclasses.dataclass(frozen=True)
class Op:
    """Options of the attention op; the slopes travel as an argument."""

    window: int | None
    implementation: Any


def attend_cached(
    op: Op,
    heads: Heads,
    tokens: Tokens,
    state: AttentionState,
    slopes: Float[Array, "H"] | None,
    *,
    split: bool,
) -> tuple[Float[Array, "B T H K"], AttentionState]:
    """Outputs, and the state after the tokens but for its clock.

    Args:
      op: the mask's window and the implementation.
      heads: queries, keys and values, position encoding applied.
      tokens: of the call.
      state: before them.
      slopes: of ALiBi, or None.
      split: whether the call's tokens are split along the sequence.

    Raises:
      ValueError: the cache or the tokens do not divide among the devices, or the tokens do not fit the cache.
    """
    q, k, v = heads
    axis, bounded = seq_axis(), state.capacity is not None
    new, fresh = entries(k, v, tokens, state.times.shape[1])
    cache = Cache(state.k, state.v, state.times)
    if axis is not None and bounded:
        check_slots(state.times.shape[1])
    if split:
        assert axis is not None
        _check_fits(tokens, state)
        o, cache = _many(op, axis, q, new, fresh, cache, slopes, jnp.any(state.clock.time > 0), bounded)
    elif axis is not None and bounded:
        o, cache = over_sequence(
            lambda cache, rows, slopes: _few(op, cache, rows, slopes),
            cache,
            (q, new, fresh),
            slopes,
            outputs=(False, True),
        )
    else:
        visit = _form(q.shape[1], state, slopes)
        rows = (cache, q, new, fresh, state.clock.time)
        o, cache = over_batch(lambda rows, slopes: visit(op, rows, slopes), rows, slopes)
    return o, dataclasses.replace(state, **cache._asdict())


def _check_fits(tokens: Tokens, state: AttentionState) -> None:
    length = tokens.run.shape[1]
    if tokens.whole and state.capacity is not None and length > state.capacity:
        raise ValueError(
            f"a prompt of {length} tokens does not fit a cache of {state.capacity}: call "
            f"init_state(capacity={length}) or more"
        )


def _form(length: int, state: AttentionState, slopes: Any) -> Callable[..., tuple[Array, Cache]]:
    """What runs a call of `length` tokens, where tokens and cache are whole."""
    slots = state.times.shape[1]
    if state.capacity is None:
        return _behind if length >= MANY_WINDOWS * slots else _alone
    too_many = length > 1 and length * (slots + length) > LARGEST_MASK
    return _by_partial_attention if too_many and slopes is None else _alone


def _alone(op: Op, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Rows whose tokens read the cache and each other in one call, by positions."""
    cache, q, new, fresh, _ = rows
    after = put(emptied(cache, fresh), new)
    near = _near(op, q, cache, after, new, new.ids)
    return attention(q, *near, alibi_slopes=slopes, implementation=op.implementation), after


def _behind(op: Op, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Rows whose tokens follow a ring of `window` slots, in the order of time: indices are as far apart as times."""
    ring, q, new, fresh, now = rows
    held, own = _in_order(_held(q, ring), now), (new.k, new.v, new.ids)
    k, v, ids = (jnp.concatenate(both, 1) for both in zip(held, own, strict=True))
    slots = ring.times.shape[1]
    q = jnp.pad(q, ((0, 0), (slots, 0), (0, 0), (0, 0)))
    mask = masks.band(True, op.window) & masks.documents(ids)
    o = attention(q, k, v, mask, alibi_slopes=slopes, implementation=op.implementation)
    return o[:, slots:], put(emptied(ring, fresh), new)


def _by_partial_attention(op: Op, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Rows with too many scores for a mask as an array: first the call's own tokens, then the cache by its content.

    What the cache holds is behind all tokens of the call, so that lengths are mask enough. Documents are shorter than
    any window of such a cache.
    """
    cache, q, new, fresh, _ = rows
    q, k, v = (zero_where_not(new.ids > 0, x) for x in (q, new.k, new.v))
    mask = masks.CAUSAL & masks.documents(new.ids)
    own = partial_attention(q, k, v, mask, implementation=op.implementation)
    held = _held(q, cache)
    content = content_first(held.ids)
    k, v = (content.sort(zero_where_not(held.ids > 0, x)) for x in held[:2])
    place = jnp.arange(1, q.shape[1] + 1, dtype=jnp.int32)[None]
    going_on = jnp.max(jnp.where(new.ids == 1, place, 0), 1)
    mask = masks.query_lengths(going_on) & masks.key_lengths(content.lengths)
    merged = partial_attention(q, k, v, mask, accumulator=own, implementation=op.implementation)
    return merged.o.astype(q.dtype), put(emptied(cache, fresh), new)


def _in_order(ring: Seen, now: Int[Array, "B"]) -> tuple[Array, Array, Int[Array, "B C"]]:
    """k, v and ids by the times that C slots stand for, `now` - C to `now` - 1; a slot that holds another is empty."""
    slots = ring.times.shape[1]
    times = now[:, None] - slots + jnp.arange(slots, dtype=jnp.int32)[None]

    def sort(x: Array) -> Array:
        return jnp.take_along_axis(x, (times % slots).reshape(*times.shape, *(1,) * (x.ndim - 2)), 1)

    k, v, ids, found = (sort(x) for x in ring)
    return k, v, jnp.where(found == times, ids, 0)


def _few(op: Op, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Each device's own slots; keys of tokens that no slot holds yet are the first device's."""
    (q, new, fresh), device = rows, lax.axis_index(SEQ_AXIS)
    after = put(emptied(cache, fresh), new, device * cache.times.shape[1])
    near = _near(op, q, cache, after, new, jnp.where(device == 0, new.ids, 0))
    found = Partial(*attention_with_lse(q, *near, alibi_slopes=slopes))
    return merge_devices(found).astype(q.dtype), after


def _near(
    op: Op, q: Array, cache: Cache, after: Cache, new: Entries, ids: Int[Array, "B T"]
) -> tuple[Array, Array, Mask]:
    """Keys, values and the mask of a few tokens.

    One token reads the cache that it was written to; more of them read the old cache and each other. Let time alone
    hide empty slots from one token. With ids in the mask, the op would write the whole cache anew for every token, to
    clear slots that hold nothing but zeros and tokens of earlier documents.
    """
    if q.shape[1] == 1:
        times = jnp.where(after.times >= 0, after.times, NEVER)
        return after.k.astype(q.dtype), after.v.astype(q.dtype), _by_time(op, new, times)
    joined = zip(_held(q, cache), (new.k, new.v, ids, new.times), strict=True)
    seen = Seen(*(jnp.concatenate([old, own], 1) for old, own in joined))
    return seen.k, seen.v, _mask(op, new, seen)


def _held(q: Array, cache: Cache) -> Seen:
    """What the cache shows to the document that continues."""
    ids = (cache.times >= 0).astype(jnp.int32)
    return Seen(cache.k.astype(q.dtype), cache.v.astype(q.dtype), ids, cache.times)


def _mask(op: Op, new: Entries, seen: Seen) -> Mask:
    return _by_time(op, new, seen.times) & masks.documents(new.ids, seen.ids)


def _by_time(op: Op, new: Entries, times: Int[Array, "B S"]) -> Mask:
    return masks.band(True, op.window) & masks.positions(new.times, times)


def _partial(op: Op, q: Array, new: Entries, seen: Seen, slopes: Any) -> Partial:
    return Partial(*attention_with_lse(q, seen.k, seen.v, _mask(op, new, seen), alibi_slopes=slopes))


def _many(
    op: Op,
    axis: SeqAxis,
    q: Array,
    new: Entries,
    fresh: Bool[Array, "B"],
    cache: Cache,
    slopes: Any,
    started: Bool[Array, ""],
    bounded: bool,
) -> tuple[Array, Cache]:
    """Tokens split along the sequence; the cache is split as well if it is `bounded`."""

    def island(sequenced: Any, batched: Any, shared: Any) -> tuple[Array, Cache]:
        (q, new, cache), (fresh, ring), (slopes, started) = sequenced, batched, shared
        merged = _among(op, axis, q, new, slopes)

        def visit(merged: Partial, cache: Cache) -> Partial:
            return merge_partials(merged, _partial(op, q, new, _held(q, cache), slopes))

        if not bounded:
            return visit(merged, ring).o.astype(q.dtype), _put_last(emptied(ring, fresh), new)
        merged = lax.cond(started, lambda: ring_pass(visit, visit(merged, cache), cache), lambda: merged)
        first = lax.axis_index(axis.name) * cache.times.shape[1]
        store = lambda cache, new: put(cache, new, first)  # noqa: E731
        return merged.o.astype(q.dtype), ring_pass(store, store(emptied(cache, fresh), new), new)

    sequenced, rows = (q, new, cache if bounded else None), (fresh, None if bounded else cache)
    return over_sequence(island, sequenced, rows, (slopes, started), outputs=(True, bounded))


def _among(op: Op, axis: SeqAxis, q: Array, new: Entries, slopes: Any) -> Partial:
    """Attention of this device's tokens to all tokens of the call."""
    stretch, valid = q.shape[1], new.ids > 0
    window = None if op.window is None or op.window >= stretch * axis.size else op.window
    if slopes is not None or (window is not None and window > stretch):
        visit = lambda merged, held: merge_partials(merged, _partial(op, q, new, held, slopes))  # noqa: E731
        own = Seen(new.k, new.v, new.ids, new.times)
        return ring_pass(visit, _partial(op, q, new, own, slopes), own)
    keys = Keys(zero_where_not(valid, new.k), zero_where_not(valid, new.v), new.ids)
    if window is not None:
        return partial_band_attention(Band(axis, True, window, implementation=op.implementation), q, keys)
    return balanced_ring(Ring(axis, True, CONTIGUOUS, implementation=op.implementation), q, keys)


def _put_last(ring: Cache, new: Entries) -> Cache:
    """A ring that all devices hold whole, with the entries of all of them: no two have one slot."""
    nothing = jax.tree.map(jnp.zeros_like, ring)
    own = put(nothing, new._replace(times=new.times + 1))
    k, v, times = lax.psum(own, SEQ_AXIS)
    written = (times > 0)[..., None, None]
    return Cache(
        jnp.where(written, k, ring.k),
        jnp.where(written, v, ring.v),
        jnp.where(times > 0, times - 1, ring.times),
    )
