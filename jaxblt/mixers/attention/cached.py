"""Attention of a call's tokens to a cache and to each other: on one device, or with tokens or cache split over `seq`.

A cache that bounds its documents lies in equal runs of slots on the devices of the sequence; the ring of a window is
whole on all of them. Many more tokens than it has slots, not split, are put behind what it holds, in the order of
time, so that blocks of scores out of the window are not visited. Where a mask would be too large for an array, the
call's own tokens and the cache are two calls of partial attention, by lengths instead of positions. A few tokens read
a long cache as far as it is filled: by one kernel, or in a loop over stretches of slots.

A few tokens are whole on all devices of the sequence too: each device attends to its own slots, and the results merge
by log-sum-exp. The stretches of many tokens attend to each other as in training (a ring pass, or a halo if there is a
window) and then to what the cache held before, which is skipped as long as it held nothing.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.mixers.attention.kv_cache import EMPTY, Cache, Entries, Meeting, emptied, put
from jaxblt.parallel.attention.by_time import Seen, partial_by_time, ring_by_time, time_mask
from jaxblt.parallel.attention.context import on_devices
from jaxblt.parallel.attention.merge import merge_devices, ring_pass
from jaxblt.parallel.attention.plan import STRETCH, Plan
from jaxblt.parallel.attention.ring import partial_in_layout
from jaxblt.parallel.attention.tiles import Keys
from jaxblt.parallel.attention.window import partial_band_attention
from jaxblt.parallel.content import content_first
from jaxblt.parallel.sequence import SEQ_AXIS
from pallas_kernels.attention import (
    Partial,
    attention,
    attention_with_lse,
    masks,
    merge_partials,
    partial_attention,
    prefix_attention,
)
from pallas_kernels.attention.arguments import zero_where_not
from pallas_kernels.attention.masks import Mask

NEVER = np.iinfo(np.int32).max
"""Time of a slot that the causal mask hides from every token."""


def attend_cached(
    plan: Plan, q: Float[Array, "B T H K"], met: Meeting, slopes: Float[Array, "H"] | None
) -> tuple[Float[Array, "B T H K"], Cache]:
    """Return the outputs and the cache after the tokens.

    Args:
      plan: of a call with a cache.
      q: queries, position encoding applied.
      met: the cache and the call's tokens.
      slopes: of ALiBi, or None.

    Raises:
      ValueError: the rows or the tokens do not divide among the devices.
    """
    if plan.cache == "visited":
        return _visited(plan, q, met, slopes)
    ways = {"joined": _joined, "behind": _behind, "apart": _apart, "shared": _shared}
    ways |= {"prefix": _prefix, "filled": _filled}
    cache, *rows = met
    return on_devices(plan, partial(ways[plan.cache], plan), cache, (q, *rows), slopes, outputs=(False, True))


def _joined(plan: Plan, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend to the cache and to each other in one call, by positions."""
    q, new, fresh, _ = rows
    after = put(emptied(cache, fresh), new)
    near = near_keys(plan, q, cache, after, new, new.ids)
    return attention(q, *near, alibi_slopes=slopes, **plan.options), after


def _behind(plan: Plan, ring: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend behind a ring of `window` slots, in the order of time: indices are as far apart as times."""
    q, new, fresh, now = rows
    held, own = _in_order(_held(ring, q.dtype), now), (new.k, new.v, new.ids)
    k, v, ids = (jnp.concatenate(both, 1) for both in zip(held, own, strict=True))
    slots = ring.times.shape[1]
    q = jnp.pad(q, ((0, 0), (slots, 0), (0, 0), (0, 0)))
    mask = plan.band & masks.documents(ids)
    o = attention(q, k, v, mask, alibi_slopes=slopes, **plan.options)
    return o[:, slots:], put(emptied(ring, fresh), new)


def _apart(plan: Plan, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend to the call's own tokens, then to the cache by its content: a mask would be too large an array.

    What the cache holds is behind all tokens of the call, so that lengths are mask enough. Documents are shorter than
    any window of such a cache.
    """
    q, new, fresh, _ = rows
    q, k, v = (zero_where_not(new.ids > 0, x) for x in (q, new.k, new.v))
    mask = masks.CAUSAL & masks.documents(new.ids)
    own = partial_attention(q, k, v, mask, **plan.options)
    held = _held(cache, q.dtype)
    content = content_first(held.ids)
    k, v = (content.sort(zero_where_not(held.ids > 0, x)) for x in held[:2])
    place = jnp.arange(1, q.shape[1] + 1, dtype=jnp.int32)[None]
    going_on = jnp.max(jnp.where(new.ids == 1, place, 0), 1)
    mask = masks.query_lengths(going_on) & masks.key_lengths(content.lengths)
    merged = partial_attention(q, k, v, mask, accumulator=own, **plan.options)
    return merged.o.astype(q.dtype), put(emptied(cache, fresh), new)


def _prefix(plan: Plan, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend to the cache as far as each row has filled it; of one token, after it was written.

    A token of time t lies in slot t, and no token of a later document sees the cache: a count is mask enough. In the
    ring of a window, which one token reads, a hole's slot still holds what is out of the window by then.
    """
    q, new, fresh, now = rows
    if q.shape[1] == 1:
        after = put(emptied(cache, fresh), new)
        counts, times = jnp.where(new.ids > 0, new.times + 1, 0), after.times
        if plan.window is not None and not plan.bounded:
            times = jnp.where(times > new.times - plan.window, times, EMPTY)
        options = {"scale": plan.scale, "cast_output": True}
        return prefix_attention(q, after.k, after.v, counts, times, **options).o, after
    counts = jnp.where(new.ids == 1, now[:, None], 0)
    held = prefix_attention(q, cache.k, cache.v, counts, cache.times, scale=plan.scale)
    mask = time_mask(plan, new.times, new.times) & masks.documents(new.ids, new.ids)
    own = Partial(*attention_with_lse(q, new.k, new.v, mask, scale=plan.scale))
    o = merge_partials(held, own).o
    # Keep the write behind the read: without the barrier XLA copies the whole cache for the read.
    cache, o = lax.optimization_barrier((cache, o))
    return o.astype(q.dtype), put(emptied(cache, fresh), new)


def _filled(plan: Plan, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend to the cache as far as it is filled; of one token, after it was written."""
    q, new, fresh, _ = rows
    if q.shape[1] == 1:
        after = put(emptied(cache, fresh), new)
        return _by_stretches(plan, q, after, new, slopes), after
    o = _by_stretches(plan, q, cache, new, slopes)
    # Keep the write behind the read: without the barrier XLA copies the whole cache for the read.
    cache, o = lax.optimization_barrier((cache, o))
    return o, put(emptied(cache, fresh), new)


def _by_stretches(plan: Plan, q: Array, held: Cache, new: Entries, slopes: Any) -> Float[Array, "B T H K"]:
    """Attend to one stretch of slots after another, up to the last that the longest row has filled.

    A token of time t lies in slot t, so no token sees a slot beyond its own time. A stretch that shows a row nothing
    changes no bit of its output: what a row gets does not depend on how long other rows are. Under `jax.vmap` the
    condition becomes a selection, and all stretches are read.
    """
    slots = held.times.shape[1]
    begin = STRETCH + slots % STRETCH
    filled = jnp.max(jnp.where(new.ids > 0, new.times + 1, 0))

    def attend(first: Any, size: int, ids: Int[Array, "B T"]) -> Partial:
        part = Cache(*(lax.dynamic_slice_in_dim(x, first, size, 1) for x in held))
        near = near_keys(plan, q, part, part, new, ids)
        return Partial(*attention_with_lse(q, *near, alibi_slopes=slopes, scale=plan.scale))

    def visit(merged: Partial, first: Int[Array, ""]) -> tuple[Partial, None]:
        further = lambda: merge_partials(merged, attend(first, STRETCH, jnp.zeros_like(new.ids)))  # noqa: E731
        return lax.cond(first < filled, further, lambda: merged), None

    firsts = jnp.arange(begin, slots, STRETCH, dtype=jnp.int32)
    merged, _ = lax.scan(visit, attend(0, begin, new.ids), firsts)
    return merged.o.astype(q.dtype)


def _in_order(ring: Seen, now: Int[Array, "B"]) -> tuple[Array, Array, Int[Array, "B C"]]:
    """Return k, v and ids by times, from `now` - C to `now` - 1 of C slots; a slot of another time is empty."""
    slots = ring.times.shape[1]
    times = now[:, None] - slots + jnp.arange(slots, dtype=jnp.int32)[None]

    def sort(x: Array) -> Array:
        return jnp.take_along_axis(x, (times % slots).reshape(*times.shape, *(1,) * (x.ndim - 2)), 1)

    k, v, ids, found = (sort(x) for x in ring)
    return k, v, jnp.where(found == times, ids, 0)


def _shared(plan: Plan, cache: Cache, rows: Any, slopes: Any) -> tuple[Array, Cache]:
    """Attend to each device's own slots; keys that no slot holds yet are the first device's."""
    (q, new, fresh, _), device = rows, lax.axis_index(SEQ_AXIS)
    after = put(emptied(cache, fresh), new, device * cache.times.shape[1])
    near = near_keys(plan, q, cache, after, new, jnp.where(device == 0, new.ids, 0))
    found = Partial(*attention_with_lse(q, *near, alibi_slopes=slopes, scale=plan.scale))
    return merge_devices(found).astype(q.dtype), after


def near_keys(
    plan: Plan, q: Array, cache: Cache, after: Cache, new: Entries, ids: Int[Array, "B T"]
) -> tuple[Array, Array, Mask]:
    """Return keys, values and the mask of a few tokens.

    One token reads the cache that it was written to; more of them read the old cache and each other. Let time alone
    hide empty slots from one token. With ids in the mask, the op would write the whole cache anew for every token, to
    clear slots that hold nothing but zeros and tokens of earlier documents.
    """
    if q.shape[1] == 1:
        times = jnp.where(after.times >= 0, after.times, NEVER)
        return after.k.astype(q.dtype), after.v.astype(q.dtype), time_mask(plan, new.times, times)
    joined = zip(_held(cache, q.dtype), (new.k, new.v, ids, new.times), strict=True)
    seen = Seen(*(jnp.concatenate([old, own], 1) for old, own in joined))
    return seen.k, seen.v, time_mask(plan, new.times, seen.times) & masks.documents(new.ids, seen.ids)


def _held(cache: Cache, dtype: Any) -> Seen:
    """Return what the cache shows to the document that continues."""
    ids = (cache.times >= 0).astype(jnp.int32)
    return Seen(cache.k.astype(dtype), cache.v.astype(dtype), ids, cache.times)


def _visited(plan: Plan, q: Array, met: Meeting, slopes: Any) -> tuple[Array, Cache]:
    """Attend with tokens split along the sequence; a cache that bounds its documents is split as well."""

    def island(sequenced: Any, batched: Any, shared: Any) -> tuple[Array, Cache]:
        (q, new, cache), (fresh, ring), (slopes, started) = sequenced, batched, shared
        merged = _among(plan, q, new, slopes)

        def visit(merged: Partial, cache: Cache) -> Partial:
            found = partial_by_time(plan, q, new.ids, new.times, _held(cache, q.dtype), slopes)
            return merge_partials(merged, found)

        if cache is None:
            return visit(merged, ring).o.astype(q.dtype), _put_last(emptied(ring, fresh), new)
        merged = lax.cond(started, lambda: ring_pass(visit, visit(merged, cache), cache), lambda: merged)
        first = lax.axis_index(plan.devices.name) * cache.times.shape[1]
        store = lambda cache, new: put(cache, new, first)  # noqa: E731
        return merged.o.astype(q.dtype), ring_pass(store, store(emptied(cache, fresh), new), new)

    split, whole = (met.cache, None) if plan.bounded else (None, met.cache)
    shared, outputs = (slopes, jnp.any(met.time > 0)), (True, plan.bounded)
    return on_devices(plan, island, (q, met.new, split), (met.fresh, whole), shared, outputs=outputs)


def _among(plan: Plan, q: Array, new: Entries, slopes: Any) -> Partial:
    """Attend to all tokens of the call with this device's."""
    valid = new.ids > 0
    keys = Keys(zero_where_not(valid, new.k), zero_where_not(valid, new.v), new.ids)
    if plan.route == "halo":
        return partial_band_attention(plan, q, keys)
    if plan.route == "ring":
        return partial_in_layout(plan, q, keys)
    return ring_by_time(plan, q, Seen(new.k, new.v, new.ids, new.times), slopes)


def _put_last(ring: Cache, new: Entries) -> Cache:
    """Return a ring, whole on all devices, with the entries of all of them: no two have one slot."""
    nothing = jax.tree.map(jnp.zeros_like, ring)
    own = put(nothing, new._replace(times=new.times + 1))
    k, v, times = lax.psum(own, SEQ_AXIS)
    written = (times > 0)[..., None, None]
    return Cache(
        jnp.where(written, k, ring.k),
        jnp.where(written, v, ring.v),
        jnp.where(times > 0, times - 1, ring.times),
    )
