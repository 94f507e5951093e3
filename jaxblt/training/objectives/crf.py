"""Linear-chain conditional random fields: the likelihood of a row of classes, and the likeliest row.

Lafferty, McCallum and Pereira (2001, ICML). Potentials φ are Float[B, T, C + 1, C]: φ[t, i, j] scores class j at t
behind class i, and φ[t, C, j] class j at the chain's first position. A position that is not there is stepped over.
Both recurrences loop over T.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def log_partition(potentials: Float[Array, "B T S C"], there: Bool[Array, "B T"]) -> Float[Array, "B"]:
    """Return log Σ_y exp(score of y) over all rows y of classes, by the forward algorithm; 0 for a row without any.

    Args:
      potentials: φ, in fp32.
      there: positions of the chain.
    """

    def step(forward: Array, now: tuple[Array, Array, Array]) -> tuple[Array, None]:
        scores, here, first = now
        inside = jax.nn.logsumexp(forward[:, :, None] + scores[:, :-1], 1)
        return _moved(forward, inside, scores, here, first), None

    forward, _ = jax.lax.scan(step, _nothing(potentials), _by_time(potentials, there))
    return jnp.where(jnp.any(there, 1), jax.nn.logsumexp(forward, 1), 0)


def path_score(
    potentials: Float[Array, "B T S C"], classes: Int[Array, "B T"], there: Bool[Array, "B T"]
) -> Float[Array, "B"]:
    """Return Σ_t φ[t, y_{t-1}, y_t] over the positions that are there.

    Args:
      potentials: φ.
      classes: y, of which those at other positions are not read.
      there: positions of the chain.
    """
    index = jnp.arange(classes.shape[1], dtype=jnp.int32)[None]
    last = jax.lax.cummax(jnp.where(there, index, -1), axis=1)
    before = jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], 1)
    came_from = jnp.take_along_axis(classes, jnp.maximum(before, 0), 1)
    row = jnp.where(before < 0, potentials.shape[-1], came_from)
    scores = jnp.take_along_axis(potentials, row[:, :, None, None], 2)[:, :, 0]
    chosen = jnp.take_along_axis(scores, jnp.where(there, classes, 0)[..., None], 2)[..., 0]
    return jnp.sum(jnp.where(there, chosen, 0), 1)


def viterbi(potentials: Float[Array, "B T S C"], there: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the row of classes with the largest score; positions that are not there repeat a neighbour's class.

    Args:
      potentials: φ.
      there: positions of the chain.
    """
    count = potentials.shape[-1]
    same = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*potentials.shape[:1], count))

    def step(best: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        scores, here, first = now
        ways = best[:, :, None] + scores[:, :-1]
        pointer = jnp.where((here & ~first)[:, None], jnp.argmax(ways, 1).astype(jnp.int32), same)
        return _moved(best, jnp.max(ways, 1), scores, here, first), pointer

    best, pointers = jax.lax.scan(step, _nothing(potentials), _by_time(potentials, there))

    def back(chosen: Array, pointer: Array) -> tuple[Array, Array]:
        return jnp.take_along_axis(pointer, chosen[:, None], 1)[:, 0], chosen

    _, found = jax.lax.scan(back, jnp.argmax(best, 1).astype(jnp.int32), pointers, reverse=True)
    return found.T


def _nothing(potentials: Float[Array, "B T S C"]) -> Float[Array, "B C"]:
    return jnp.zeros((potentials.shape[0], potentials.shape[-1]), jnp.float32)


def _by_time(potentials: Float[Array, "B T S C"], there: Bool[Array, "B T"]) -> tuple[Array, Array, Array]:
    """Return potentials, whether a position is there, and whether it is the chain's first, time in front."""
    first = there & (jnp.cumsum(there, 1, dtype=jnp.int32) == 1)
    return jnp.moveaxis(potentials, 1, 0), there.T, first.T


def _moved(
    old: Float[Array, "B C"],
    inside: Float[Array, "B C"],
    scores: Float[Array, "B S C"],
    here: Bool[Array, "B"],
    first: Bool[Array, "B"],
) -> Float[Array, "B C"]:
    """Return scores behind a position: of a start, of a step inside, or the old ones where it is not there."""
    return jnp.where(here[:, None], jnp.where(first[:, None], scores[:, -1], inside), old)
