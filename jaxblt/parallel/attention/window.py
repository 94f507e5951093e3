"""Windowed attention over a split sequence: a halo of keys from the neighbours instead of a ring.

A window of w positions reaches w - 1 keys beyond a device's own. In the tile of the first w - 1 queries and the
last w - 1 keys of the device before, query t sees key s iff s >= t: a causal mask with both read backwards,
which kernels have natively.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.attention.ring import SAVED_LSE, SAVED_OUT
from jaxblt.parallel.attention.tiles import Keys, Tile, add_at, attend, tile_gradients
from pallas_kernels.attention import Partial
from pallas_kernels.runtime import OwnGradient


def band_attention(plan: Plan, q: Float[Array, "B T H K"], keys: Keys) -> Float[Array, "B T H K"]:
    """Attend exactly to this device's keys and the halo.

    Call it in an island, with a window within a stretch.
    """
    return _attend_all(plan, q, _sources(plan, keys))


def partial_band_attention(plan: Plan, q: Float[Array, "B T H K"], keys: Keys) -> Partial:
    """Attend as `band_attention`, in fp32 and with the log-sum-exp, to be merged with more keys.

    It is not differentiable.
    """
    sources = _sources(plan, keys)
    return _merged(plan, q, sources)


def _reach(plan: Plan) -> int:
    """Return how many keys beyond a device's own a window sees."""
    assert plan.window is not None
    return plan.window - 1


def _sources(plan: Plan, keys: Keys) -> tuple[Keys, ...]:
    """Fetch the keys that the window reaches of the device before, and after it if not causal, to join its own."""
    reach, last = _reach(plan), plan.devices.size - 1
    sources = [keys]
    if reach:
        tail = jax.tree.map(lambda x: x[:, -reach:], keys)
        sources.append(lax.ppermute(tail, plan.devices.name, [(i, i + 1) for i in range(last)]))
    if reach and not plan.causal:
        head = jax.tree.map(lambda x: x[:, :reach], keys)
        sources.append(lax.ppermute(head, plan.devices.name, [(i + 1, i) for i in range(last)]))
    return tuple(sources)


def _tiles(plan: Plan, length: int) -> list[Tile]:
    """Return a tile for each source: own keys, those from before, those from after."""
    reach, index = _reach(plan), lax.axis_index(plan.devices.name)
    own = Tile(0, 0, length, plan.causal, plan.window)
    before = Tile(0, 0, reach, causal=True, reverse=True, live=index > 0)
    after = Tile(length - reach, 0, reach, causal=True, live=index < plan.devices.size - 1)
    return [own, before, after]


def _merged(plan: Plan, q: Array, sources: tuple[Keys, ...]) -> Partial:
    merged = None
    for held, tile in zip(sources, _tiles(plan, q.shape[1]), strict=False):
        merged = attend(tile, q, sources[0].segment_ids, held, plan.options, merged)
    assert merged is not None
    return merged


def _primal(plan: Plan, q: Array, sources: tuple[Keys, ...]) -> Array:
    return _merged(plan, q, sources).o.astype(q.dtype)


def _forward(plan: Plan, q: Array, sources: tuple[Keys, ...]) -> tuple[Array, Any]:
    o, lse = _merged(plan, q, sources)
    o = checkpoint_name(o.astype(q.dtype), SAVED_OUT)
    return o, (q, sources, Partial(o, checkpoint_name(lse, SAVED_LSE)))


def _backward(plan: Plan, saved: Any, do: Array) -> tuple[Array, tuple[Keys, ...]]:
    q, sources, merged = saved
    dq, gradients = jnp.zeros_like(q, jnp.float32), []
    for held, tile in zip(sources, _tiles(plan, q.shape[1]), strict=False):
        add_q, dk, dv = tile_gradients(tile, q, sources[0].segment_ids, held, merged, do, plan.options)
        dq = add_at(dq, add_q, tile.q_start, 1)
        gradients.append(Keys(dk.astype(held.k.dtype), dv.astype(held.v.dtype), None))
    return dq.astype(q.dtype), tuple(gradients)


_attend_all = OwnGradient(_primal, nondiff_argnums=(0,))
_attend_all.defvjp(_forward, _backward)
