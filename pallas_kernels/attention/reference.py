"""Attention as the textbook has it: dense, in fp32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.mask import EMPTY_LSE, Mask


def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Output and log-sum-exp of the scores, both fp32."""
    queries, keys, repeats = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest")
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if alibi_slopes is not None:
        distances = mask.distances(queries, keys).astype(jnp.float32)
        scores -= alibi_slopes.astype(jnp.float32)[None, :, None, None] * distances[:, None]
    seen = mask.dense(queries, keys)[:, None]
    scores = jnp.where(seen, scores, EMPTY_LSE)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log(total), EMPTY_LSE)[..., 0]
    return jnp.einsum("bhts,bshk->bthk", weights / total, v, precision="highest"), lse


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """The output alone, in q's dtype."""
    return attention_with_lse(q, k, v, mask, alibi_slopes=alibi_slopes, scale=scale)[0].astype(q.dtype)
