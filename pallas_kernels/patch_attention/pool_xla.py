"""Patches over their own bytes in O(S K) time and memory: sums over runs of bytes, no byte-by-patch array."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike

_LOWEST = -1e30
"""Score of what is masked, and log-sum-exp of a patch without bytes."""


def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
) -> Float[Array, "B N P H K"]:
    """Each patch over its own bytes; within a block the ids do not fall."""
    return _pool(*vary_alike(q, k, v, patch_ids))


def _over_blocks(fn: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(jax.vmap(fn))


def _primal(q: Array, k: Array, v: Array, patch_ids: Array) -> Array:
    return _over_blocks(_attend)(q, k, v, patch_ids)[0]


def _forward(q: Array, k: Array, v: Array, patch_ids: Array) -> tuple[Array, Any]:
    o, lse = _over_blocks(_attend)(q, k, v, patch_ids)
    return o, (q, k, v, patch_ids, o, lse)


def _backward(saved: Any, do: Array) -> tuple[Any, ...]:
    return (*_over_blocks(_pull)(*saved, do), None)


_pool = jax.custom_vjp(_primal)
_pool.defvjp(_forward, _backward)


def _attend(
    q: Float[Array, "P H K"], k: Float[Array, "S H K"], v: Float[Array, "S H K"], ids: Int[Array, "S"]
) -> tuple[Float[Array, "P H K"], Float[Array, "P H"]]:
    """Output of one block, and the log-sum-exp of its scores."""
    patches = q.shape[0]
    inside = (ids < patches)[:, None]
    scores = jnp.where(inside, jnp.sum(_of_patch(q, ids) * _fp32(k), -1) * q.shape[-1] ** -0.5, _LOWEST)
    top = _over_patch(jax.ops.segment_max, scores, ids, patches)
    p = jnp.where(inside, jnp.exp(scores - _of_patch(top, ids)), 0.0)
    total = _over_patch(jax.ops.segment_sum, p, ids, patches)
    weighted = jnp.where(inside[..., None], p[..., None] * _fp32(v), 0.0)
    acc = _over_patch(jax.ops.segment_sum, weighted, ids, patches)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return (acc / total[..., None]).astype(q.dtype), jnp.where(some, top + jnp.log(total), _LOWEST)


def _pull(
    q: Array, k: Array, v: Array, ids: Array, o: Array, lse: Array, do: Array
) -> tuple[Float[Array, "P H K"], Float[Array, "S H K"], Float[Array, "S H K"]]:
    """Gradients of q, k, v in one block; the scores are made again from the log-sum-exp."""
    patches, scale = q.shape[0], q.shape[-1] ** -0.5
    inside = (ids < patches)[:, None, None]
    mine, ours = _of_patch(q, ids), _of_patch(do, ids)
    keys, values = jnp.where(inside, _fp32(k), 0.0), jnp.where(inside, _fp32(v), 0.0)
    scores = jnp.sum(mine * keys, -1) * scale
    p = jnp.where(inside[..., 0], jnp.exp(scores - _of_patch(lse, ids)), 0.0)
    delta = jnp.sum(_fp32(do) * _fp32(o), -1)
    ds = p * (jnp.sum(ours * values, -1) - _of_patch(delta, ids)) * scale
    dq = _over_patch(jax.ops.segment_sum, ds[..., None] * keys, ids, patches)
    return dq.astype(q.dtype), (ds[..., None] * mine).astype(k.dtype), (p[..., None] * ours).astype(v.dtype)


def _of_patch(x: Float[Array, "P ..."], ids: Int[Array, "S"]) -> Float[Array, "S ..."]:
    """What each byte's patch holds, in fp32; zeros for padding."""
    return _fp32(x.at[ids].get(indices_are_sorted=True, mode="fill", fill_value=0))


def _over_patch(
    reduce: Callable[..., Array], x: Float[Array, "S ..."], ids: Int[Array, "S"], patches: int
) -> Float[Array, "P ..."]:
    return reduce(x, ids, num_segments=patches + 1, indices_are_sorted=True)[:patches]


def _fp32(x: Array) -> Array:
    return x.astype(jnp.float32)
