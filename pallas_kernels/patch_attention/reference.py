"""Attention between bytes and patches as the textbook has it: dense masks, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30


def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
) -> Float[Array, "B N P H K"]:
    """Attend from each patch to its own bytes."""
    slots = jnp.arange(q.shape[2], dtype=patch_ids.dtype)
    own = patch_ids[:, :, None, :] == slots[None, None, :, None]
    return _attend(q, k, v, own, jnp.zeros((1, 1, 1, 1, 1), jnp.float32))


def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
    distances: tuple[int, ...] | None = None,
) -> Float[Array, "B N S H K"]:
    """Attend from each byte to the keys latest - d, for all distances d; 0 .. look_back - 1 if None."""
    away = jnp.asarray(tuple(range(look_back)) if distances is None else distances, latest.dtype)
    back = latest[..., None] - jnp.arange(k.shape[2], dtype=latest.dtype)[None, None, None, :]
    same = back[..., None] == away[None, None, None, None]
    seen = jnp.any(same, -1) & valid[:, :, None, :] & (latest >= 0)[..., None]
    relative = jnp.moveaxis(bias.astype(jnp.float32)[:, jnp.argmax(same, -1)], 0, 2)
    return _attend(q, k, v, seen, relative)


def _attend(
    q: Array, k: Array, v: Array, seen: Bool[Array, "B N q k"], bias: Float[Array, "#B #N #H #q #k"]
) -> Float[Array, "B N q H K"]:
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    scores = jnp.einsum("bnqhk,bnshk->bnhqs", wide_q, wide_k, precision="highest")
    seen = seen[:, :, None]
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5 + bias, _MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, -1, keepdims=True)
    weights /= jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bnhqs,bnshk->bnqhk", weights, wide_v, precision="highest").astype(q.dtype)
