"""Ring attention to packed rows by kernels that know lengths and no documents.

A run is a stretch of tokens with its content first. If ids rise along a row, two runs have at most one document in
common: that of the earlier run's last token and of the later run's first one. Its queries are a prefix of the later
run. Its keys are a suffix of the earlier run's content, which is a prefix when read backwards. The order of keys does
not matter between different runs. Every run attends to its own keys as a packed row.

Devices find out whether ids rise. If they do not in some row, all devices take the ring with segment ids. The ring has
to be causal: queries that see later keys would have to be read backwards instead. Outputs beyond the lengths are hidden
after each call.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.attention.ring import SAVED_LSE, SAVED_OUT, partial_ring_attention, ring_gradients
from jaxblt.parallel.attention.tiles import Keys, Tile, attend, tile_gradients
from jaxblt.parallel.content import backwards
from pallas_kernels.attention import Partial
from pallas_kernels.runtime import OwnGradient, varying_axes


def documents_rise(plan: Plan, ids: Int[Array, "B T"]) -> Bool[Array, ""]:
    """Check that no id is less than one before it, in any row of any device, with content first in every run."""
    runs = ids.reshape(ids.shape[0], plan.runs, -1)
    within = jnp.all((runs[..., 1:] <= 0) | (runs[..., 1:] >= runs[..., :-1]))
    ends = jnp.stack((runs[..., 0], jnp.max(runs, -1)))
    ends = lax.all_gather(ends, plan.devices.name, axis=2, tiled=True)
    stretches = plan.devices.size * plan.runs
    first, last = jnp.maximum(ends[..., np.argsort(plan.layout.order(stretches, plan.devices.size))], 0)
    between = jnp.all((first[:, 1:] == 0) | (first[:, 1:] >= lax.cummax(last, axis=1)[:, :-1]))
    # Over rows too: an exchange in a branch is one operation of all devices, of which no part may be missing.
    return lax.pmin((within & between).astype(jnp.int32), tuple(sorted(varying_axes(ids)))) > 0


def _own(plan: Plan, q: Array) -> Tile:
    return Tile(0, 0, q.shape[1] // plan.runs, causal=True, each=plan.runs, own=True)


def _turned(plan: Plan, keys: Keys) -> Keys:
    """Return keys and values with the content of every run in reverse order, or back in order; ids stay."""
    assert keys.segment_ids is not None
    size = keys.segment_ids.shape[1] // plan.runs
    lengths = jnp.sum(keys.segment_ids.reshape(-1, size) > 0, 1, dtype=jnp.int32)
    k, v = (backwards(x.reshape(-1, size, *x.shape[2:]), lengths).reshape(x.shape) for x in keys[:2])
    return keys._replace(k=k, v=v)


def _merged(plan: Plan, q: Array, keys: Keys) -> tuple[Partial, Array]:
    """Return the output with its log-sum-exp, and whether ids rise."""
    assert keys.segment_ids is not None
    rise = documents_rise(plan, keys.segment_ids)

    def by_documents(q: Array, keys: Keys) -> Partial:
        own = attend(_own(plan, q), q, keys.segment_ids, keys, plan.options, None)
        return partial_ring_attention(plan, q, _turned(plan, keys), own, between=True)

    def by_ids(q: Array, keys: Keys) -> Partial:
        return partial_ring_attention(replace(plan, implementation="xla"), q, keys)

    return lax.cond(rise, by_documents, by_ids, q, keys), rise


def _primal(plan: Plan, q: Float[Array, "B T H K"], keys: Keys) -> Float[Array, "B T H K"]:
    return _merged(plan, q, keys)[0].o.astype(q.dtype)


def _forward(plan: Plan, q: Array, keys: Keys) -> tuple[Array, Any]:
    (o, lse), rise = _merged(plan, q, keys)
    o = checkpoint_name(o.astype(q.dtype), SAVED_OUT)
    lse, rise = checkpoint_name((lse, rise), SAVED_LSE)
    return o, (q, keys, Partial(o, lse), rise)


def _backward(plan: Plan, saved: Any, do: Float[Array, "B T H K"]) -> tuple[Array, Keys]:
    *arrays, rise = saved

    def by_documents(q: Array, keys: Keys, merged: Partial, do: Array) -> tuple[Array, Array, Array]:
        dq, dk, dv = tile_gradients(_own(plan, q), q, keys.segment_ids, keys, merged, do, plan.options)
        start = _turned(plan, keys._replace(k=dk, v=dv))
        start = (dq, start.k, start.v)
        dq, dk, dv = ring_gradients(plan, q, _turned(plan, keys), merged, do, start, between=True)
        back = _turned(plan, keys._replace(k=dk, v=dv))
        return dq, back.k, back.v

    def by_ids(q: Array, keys: Keys, merged: Partial, do: Array) -> tuple[Array, Array, Array]:
        return ring_gradients(replace(plan, implementation="xla"), q, keys, merged, do)

    dq, dk, dv = lax.cond(rise, by_documents, by_ids, *arrays, do)
    return dq, Keys(dk, dv, None)


packed_ring_attention = OwnGradient(_primal, nondiff_argnums=(0,))
"""`ring_attention` of a causal ring to keys with ids, the content of every run first in q and keys."""
packed_ring_attention.defvjp(_forward, _backward)
