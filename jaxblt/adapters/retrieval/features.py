"""Six numbers that say how a set of neighbours lies about its query.

The query q and its n <= k neighbours v_1..v_n are unit vectors, s_j = q . v_j, and c is the mean of v_i . v_j over the
n (n - 1) / 2 pairs, 1 without a pair. No feature depends on the order of the neighbours. Each is finite for any n,
and 0 for n = 0. Names, weights and thresholds are those of a prototype of routed adapters that gives no formulas.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

FEATURES = ("coverage", "diversity", "consistency", "coherence", "confidence", "density")
"""Names of the features, in order."""
DECAY = 0.1
"""Of the weight of a neighbour with its rank."""
COVERS = 0.3
"""Similarity above which a neighbour covers its query."""
APART, SPREAD = 0.7, 0.3
"""Weights of the two parts of diversity."""

Similar = Float[Array, "*Q K"]
Pairs = Float[Array, "*Q K K"]
Present = Bool[Array, "*Q K"]
Feature = Float[Array, "*Q"]


def neighbour_features(similar: Similar, pairs: Pairs, present: Present) -> Float[Array, "*Q F"]:
    """Return the six features in the order of `FEATURES`.

    Args:
      similar: s_j; anything finite or -inf where there is no neighbour.
      pairs: v_i . v_j.
      present: whether there is a neighbour.
    """
    found = (
        coverage(similar, present),
        diversity(similar, pairs, present),
        consistency(pairs, present),
        coherence(similar, present),
        confidence(similar, present),
        density(similar, present),
    )
    return jnp.stack(found, -1)


def coverage(similar: Similar, present: Present) -> Feature:
    """Return sum w_j a_j [s_j > .3] / sum w_j a_j in [0, 1], with a = softmax(s) and w_j = exp(-.1 rank_j).

    The most similar neighbour has rank 0. Equal neighbours may swap ranks, which changes no sum.
    """
    ranked = -jnp.sort(jnp.where(present, -similar, jnp.inf), -1)
    there = jnp.isfinite(ranked)
    attention = jax.nn.softmax(jnp.where(there, ranked, jnp.finfo(ranked.dtype).min), -1)
    rank = jnp.broadcast_to(jnp.arange(ranked.shape[-1], dtype=ranked.dtype), ranked.shape)
    weight = jnp.where(there, attention * jnp.exp(-DECAY * rank), 0.0)
    covered = jnp.sum(jnp.where(ranked > COVERS, weight, 0.0), -1)
    return covered / jnp.maximum(jnp.sum(weight, -1), jnp.finfo(ranked.dtype).tiny)


def diversity(similar: Similar, pairs: Pairs, present: Present) -> Feature:
    """Return .7 (1 - c) + .3 (max s - min s): how far neighbours lie apart, and how unequal similarities are."""
    most = jnp.max(jnp.where(present, similar, -jnp.inf), -1)
    least = jnp.min(jnp.where(present, similar, jnp.inf), -1)
    some = jnp.any(present, -1)
    return jnp.where(some, APART * (1 - consistency(pairs, present)) + SPREAD * (most - least), 0.0)


def consistency(pairs: Pairs, present: Present) -> Feature:
    """Return c, the mean cosine of pairs of neighbours, in [-1, 1]; 1 for a single neighbour."""
    other = jnp.broadcast_to(~jnp.eye(present.shape[-1], dtype=bool), pairs.shape)
    both = present[..., :, None] & present[..., None, :] & other
    count = jnp.sum(both, (-2, -1))
    total = jnp.sum(jnp.where(both, pairs, 0.0), (-2, -1))
    mean = total / jnp.maximum(count, 1).astype(total.dtype)
    return jnp.where(jnp.any(present, -1), jnp.where(count > 0, mean, 1.0), 0.0)


def coherence(similar: Similar, present: Present) -> Feature:
    """Return exp(-var s) in (0, 1]; the variance divides by n."""
    return jnp.where(jnp.any(present, -1), jnp.exp(-_moments(similar, present)[1]), 0.0)


def confidence(similar: Similar, present: Present) -> Feature:
    """Return max s exp(-std s), in [-1, 1]."""
    most = jnp.max(jnp.where(present, similar, -jnp.inf), -1)
    found = most * jnp.exp(-jnp.sqrt(_moments(similar, present)[1]))
    return jnp.where(jnp.any(present, -1), found, 0.0)


def density(similar: Similar, present: Present) -> Feature:
    """Return (n / k) exp(-(1 - mean s)) in [0, 1]: 1 - s is half the squared distance, missing neighbours count."""
    share = jnp.mean(present.astype(similar.dtype), -1)
    return share * jnp.exp(_moments(similar, present)[0] - 1)


def _moments(similar: Similar, present: Present) -> tuple[Feature, Feature]:
    """Return mean and variance of the similarities that are there; zeros without one."""
    count = jnp.maximum(jnp.sum(present, -1, keepdims=True), 1).astype(similar.dtype)
    mean = jnp.sum(jnp.where(present, similar, 0.0), -1, keepdims=True) / count
    square = jnp.where(present, (jnp.where(present, similar, 0.0) - mean) ** 2, 0.0)
    return mean[..., 0], jnp.sum(square / count, -1)
