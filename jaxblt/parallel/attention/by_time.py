"""Attention by times, the tokens' places in their documents: for rules, and for caches whose slots are in no order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.parallel.attention.hops import Exchange
from jaxblt.parallel.attention.merge import ring_pass
from jaxblt.parallel.attention.plan import Call, Plan
from jaxblt.parallel.sequence import SeqAxis, whole_rows
from pallas_kernels.attention import Partial, attention_with_lse, masks, merge_partials
from pallas_kernels.attention.masks import Mask


class Seen(NamedTuple):
    """Keys and values with the documents and times that decide who sees them."""

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]
    ids: Int[Array, "B S"]
    times: Int[Array, "B S"]


def document_times(ids: Int[Array, "B T"], axis: SeqAxis | None) -> Int[Array, "B T"]:
    """Return steps since the start of the document of each token or hole; `axis` splits the tokens, or is None."""
    length = ids.shape[1]
    if axis is not None:
        ids = lax.all_gather(ids, axis.name, axis=1, tiled=True) if axis.manual else whole_rows(ids)
    document = jnp.abs(ids)
    index = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    changed = document != jnp.pad(document[:, :-1], ((0, 0), (1, 0)))
    times = index - lax.cummax(jnp.where(changed, index, 0), axis=1)
    if axis is None or not axis.manual:
        return times
    return lax.dynamic_slice_in_dim(times, lax.axis_index(axis.name) * length, length, 1)


def row_times(rows: int, length: int, axis: SeqAxis) -> Int[Array, "B T"]:
    """Return the places of a device's `length` tokens in rows of one document."""
    first = lax.axis_index(axis.name) * length if axis.manual else 0
    return jnp.broadcast_to(first + jnp.arange(length, dtype=jnp.int32)[None], (rows, length))


def rule_times(call: Call, plan: Plan, segment_ids: Int[Array, "B T"] | None) -> Int[Array, "B T"] | None:
    """Return the times that a rule compares; None if it compares indices.

    Indices are known while the program is traced, so blocks can be left out.

    Whole rows of one document need no times, and neither do rules of distances: documents are contiguous.
    """
    rule, axis = plan.rule, plan.axis
    if rule is None or (axis is None and (rule.is_shift_invariant or not call.asked.packed)):
        return None
    if segment_ids is not None:
        return document_times(segment_ids, axis)
    return None if axis is None else row_times(call.rows, call.tokens, axis)


def time_mask(plan: Plan, times: Int[Array, "B T"], kv_times: Int[Array, "B S"]) -> Mask:
    """Return the plan's mask between tokens at these times, of one document."""
    return plan.band & masks.positions(times, kv_times)


def partial_by_time(
    plan: Plan,
    q: Float[Array, "B T H K"],
    ids: Int[Array, "B T"],
    times: Int[Array, "B T"],
    seen: Seen,
    slopes: Float[Array, "H"] | None,
) -> Partial:
    """Return attention of tokens to keys of the same documents, with its log-sum-exp."""
    mask = time_mask(plan, times, seen.times) & masks.documents(ids, seen.ids)
    return Partial(*attention_with_lse(q, seen.k, seen.v, mask, alibi_slopes=slopes, scale=plan.scale))


def ring_by_time(
    plan: Plan,
    q: Float[Array, "B T H K"],
    own: Seen,
    slopes: Float[Array, "H"] | None,
    exchange: Exchange | None = None,
) -> Partial:
    """Return attention of this device's tokens to those of all devices; keys and values pass all of them.

    With an `exchange` only those keys travel that the plan's rule may show to some device.
    """

    def visit(merged: Partial, held: Seen) -> Partial:
        return merge_partials(merged, attend(held))

    def attend(held: Seen) -> Partial:
        return partial_by_time(plan, q, own.ids, own.times, held, slopes)

    if exchange is None:
        return ring_pass(visit, attend(own), own)
    merged = ring_pass(visit, attend(own), own, exchange.hops)
    return visit(merged, _gather_starts(plan, own, exchange)) if exchange.first else merged


def _gather_starts(plan: Plan, own: Seen, exchange: Exchange) -> Seen:
    """Return the first tokens of the document that leaves each device's stretch, of devices that no hop visits."""
    axis, length = plan.devices, own.times.shape[1]
    # Count back from the end of the stretch: a document that a later device sees goes on there.
    start = jnp.clip(length - 1 - own.times[:, -1], 0, length - exchange.first)
    cut = jax.vmap(lambda x, start: lax.dynamic_slice_in_dim(x, start, exchange.first))
    starts = jax.tree.map(lambda x: lax.all_gather(cut(x, start), axis.name, axis=1, tiled=True), own)
    owner = np.arange(axis.size * exchange.first) // exchange.first
    hop = (lax.axis_index(axis.name) - owner) % axis.size
    visited = jnp.asarray(np.isin(np.arange(axis.size), (0, *exchange.hops)))[hop]
    # Count no key twice: hops have shown all keys of the devices that they visit.
    return starts._replace(ids=jnp.where(visited, 0, starts.ids))
