"""Patches over their own bytes in O(S K) time and memory: sums over runs of bytes, no byte-by-patch array."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.patch_attention.runs import find_runs, reduce_runs

_LOWEST = -1e30
"""Log-sum-exp of a patch without bytes."""


def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
) -> Float[Array, "B N P H K"]:
    """Attend from each patch to its own bytes; within a block the ids do not fall."""
    q, k, v, patch_ids = vary_alike(q, k, v, patch_ids)
    flat = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
    return _pool(*flat, patch_ids).reshape(q.shape)


def _primal(
    q: Float[Array, "R H K"], k: Float[Array, "T H K"], v: Float[Array, "T H K"], ids: Int[Array, "B N S"]
) -> Float[Array, "R H K"]:
    return _attend(q, k, v, ids)[0]


def _forward(q: Array, k: Array, v: Array, ids: Array) -> tuple[Array, Any]:
    o, lse = _attend(q, k, v, ids)
    return o, (q, k, v, ids, lse)


_pool = OwnGradient(_primal)


def _attend(q: Array, k: Array, v: Array, ids: Array) -> tuple[Float[Array, "R H K"], Float[Array, "R H"]]:
    """Return output, and the log-sum-exp of the scores of each patch."""
    runs, slots = find_runs(ids, _slots(q, ids)), slot_of(ids, _slots(q, ids))
    scores = jnp.sum(_of_patch(q, slots) * _fp32(k), -1) * q.shape[-1] ** -0.5
    top = reduce_runs(lambda pick: pick(scores), runs, jnp.maximum, _LOWEST)
    p = jnp.exp(scores - _of_patch(top, slots))
    total = reduce_runs(lambda pick: pick(p), runs)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    o = reduce_runs(lambda pick: pick(p)[..., None] * _fp32(pick(v)), runs) / total[..., None]
    return o.astype(q.dtype), jnp.where(some, top + jnp.log(total), _LOWEST)


def _backward(saved: Any, do: Float[Array, "R H K"]) -> tuple[Any, ...]:
    """Return gradients of q, k, v; the scores are made again from the log-sum-exp."""
    q, k, v, ids, lse = saved
    runs, slots = find_runs(ids, _slots(q, ids)), slot_of(ids, _slots(q, ids))
    scale = q.shape[-1] ** -0.5
    inside = (slots < len(q))[:, None]
    scores = jnp.sum(_of_patch(q, slots) * _fp32(k), -1) * scale
    p = jnp.where(inside, jnp.exp(scores - _of_patch(lse, slots)), 0.0)
    dp = jnp.sum(_of_patch(do, slots) * _fp32(v), -1)
    # Avoid do o: o is rounded, and where one byte has all the weight only its rounding would be left.
    delta = reduce_runs(lambda pick: pick(p * dp), runs)
    ds = jnp.where(inside, p * (dp - _of_patch(delta, slots)) * scale, 0.0)
    dq = reduce_runs(lambda pick: pick(ds)[..., None] * _fp32(pick(k)), runs)
    dk, dv = ds[..., None] * _of_patch(q, slots), p[..., None] * _of_patch(do, slots)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_pool.defvjp(_forward, _backward)


def _slots(q: Array, ids: Array) -> int:
    """Return P, of a block."""
    return len(q) * ids.shape[-1] // ids.size


def slot_of(ids: Int[Array, "B N S"], slots: int) -> Int[Array, "T"]:
    """Return the row of each byte's patch among those of all blocks; past the last for padding."""
    blocks = ids.reshape(-1, ids.shape[-1])
    rows = blocks + slots * jnp.arange(len(blocks), dtype=jnp.int32)[:, None]
    return jnp.where(blocks < slots, rows, slots * len(blocks)).reshape(-1)


def _of_patch(x: Float[Array, "R ..."], slots: Int[Array, "T"]) -> Float[Array, "T ..."]:
    """Return what each byte's patch holds, in fp32; zeros for padding."""
    return _fp32(x.at[slots].get(mode="fill", fill_value=0))


def _fp32(x: Array) -> Array:
    return x.astype(jnp.float32)
