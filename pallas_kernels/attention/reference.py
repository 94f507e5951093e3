"""Attention as the textbook has it: dense, in fp32."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.scores import Score


def attention_with_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: Float[Array, "H"] | None = None,
    scale: float | None = None,
    score: Score | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Return output and log-sum-exp of the scores, both fp32."""
    queries, keys, heads, repeats = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest")
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if alibi_slopes is not None:
        distances = mask.distances(queries, keys).astype(jnp.float32)
        scores -= alibi_slopes.astype(jnp.float32)[None, :, None, None] * distances[:, None]
    if score is not None:
        here, there = mask.places(queries, keys)
        head = jnp.arange(heads, dtype=jnp.int32)[None, :, None, None]
        scores = score(scores, head, here[:, None, :, None], there[:, None, None])
    seen = _by_head(mask.seen(queries, keys), heads)
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
    score: Score | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output alone, in q's dtype."""
    o, _ = attention_with_lse(q, k, v, mask, alibi_slopes=alibi_slopes, scale=scale, score=score)
    return o.astype(q.dtype)


def _by_head(seen: Bool[Array, "#B #G 1 T S"], heads: int) -> Bool[Array, "#B #H T S"]:
    """Give a mask by key head to the query heads that share it."""
    groups = seen.shape[1]
    return seen[:, :, 0] if groups == 1 else jnp.repeat(seen[:, :, 0], heads // groups, axis=1)


def gradients_given_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Return these keys' dq, and dk and dv, fp32: p = exp(score - lse), dscore = p (do.v - do.o)."""
    repeats = q.shape[2] // k.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, o, do = (x.astype(jnp.float32) for x in (q, k, v, o, do))
    k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    dot = functools.partial(jnp.einsum, precision="highest")
    seen = _by_head(mask.seen(q.shape[1], k.shape[1]), q.shape[2])
    scores = jnp.where(seen, factor * dot("bthk,bshk->bhts", q, k), EMPTY_LSE)
    p = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0)
    delta = dot("bthk,bthk->bht", do, o)
    ds = factor * p * (dot("bthk,bshk->bhts", do, v) - delta[..., None])
    dq, dk, dv = dot("bhts,bshk->bthk", ds, k), dot("bhts,bthk->bshk", ds, q), dot("bhts,bthk->bshk", p, do)

    def by_group(x: Float[Array, "B S H K"]) -> Float[Array, "B S G K"]:
        return x.reshape(*x.shape[:2], -1, repeats, x.shape[3]).sum(3)

    return dq, by_group(dk), by_group(dv)
