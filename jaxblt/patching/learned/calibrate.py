"""Theta and tau of a router before step 0: an untrained score lies in a narrow band that no fixed threshold meets."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxblt.patching.learned.config import BoundaryConfig
from jaxblt.patching.learned.mixture import SHARPNESS, measure_separation

NEAR = 0.02
"""The relative distance from the target's rate that theta may take for the sake of a wider gap between scores."""
LEAST_SPREAD = 1e-4
"""The least tau: scores that hardly differ would be divided by 0."""


def calibrate_router(
    config: BoundaryConfig,
    params: dict[str, Any],
    scores: Float[np.ndarray, "B T K"],
    *,
    here: Bool[np.ndarray, "B T"],
    target: float,
) -> dict[str, Any]:
    """Return the router's parameters with theta at the target's rate, and tau the scores' standard deviation.

    One in `target` bytes has a score above theta, the middle of the widest gap within 2 % of that rate. Where all
    scores near it are equal, as those of a few motifs may be, theta lies in the gap whose rate is nearest. A hybrid
    has such a threshold for each score, its center, and the score's deviation as its spread. The gate begins at the
    scores that part the sample most clearly (`mixture`).

    Args:
      config: of the router; a plain one has nothing to calibrate.
      params: of the router, as they were drawn.
      scores: of `Router`, of a sample of the data.
      here: bytes that count: not padding, and no first bytes, where p is 1.
      target: bytes a patch.

    Raises:
      ValueError: a score is not finite, or nothing counts.
    """
    if config.plain:
        return params
    s = scores[here].astype(np.float64)
    if not s.size:
        raise ValueError(
            f"none of the {here.size} places of the sample counts before step 0, as each is padding or the first of "
            "its document or block: take data or a patcher with more in one"
        )
    if not np.isfinite(s).all():
        raise ValueError("the router's scores must be finite before step 0: look at the data's entropies")
    found, mixed = _mixture(s, target) if config.strategy == "adaptive_hybrid" else ({}, s[:, 0])
    found |= {
        "theta": np.array([_threshold(mixed, target)]),
        "log_tau": np.log(np.maximum([mixed.std()], LEAST_SPREAD)),
    }
    return params | {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}


def _mixture(s: Float[np.ndarray, "N K"], target: float) -> tuple[dict[str, Any], Float[np.ndarray, "N"]]:
    """Return a hybrid's parameters, and the scores as its gate mixes them at first."""
    center = np.array([_threshold(one, target) for one in s.T])
    spread = np.maximum(s.std(0), LEAST_SPREAD)
    separation = measure_separation(s, s > center, np.ones((len(s), 1), bool))
    share = np.exp(SHARPNESS * (separation - separation.max()))
    found = {"center": center, "log_spread": np.log(spread), "separation": separation}
    return found, ((s - center) / spread) @ (share / share.sum())


def _threshold(scores: Float[np.ndarray, "N"], target: float) -> float:
    """Return the middle of the widest gap between scores whose ranks are near N / target, from the largest.

    If there is none, it is that of the nearest gap.
    """
    ordered = np.sort(scores)[::-1]
    rank = len(ordered) / target
    first = int(np.clip(np.floor(rank * (1 - NEAR)), 1, len(ordered) - 1))
    last = int(np.clip(np.ceil(rank * (1 + NEAR)), first, len(ordered) - 1))
    gaps = 1 + np.flatnonzero(ordered[:-1] > ordered[1:])
    if len(gaps) and ordered[first - 1] == ordered[last]:
        first = last = int(gaps[np.argmin(np.abs(np.log(gaps / rank)))])
    above, below = ordered[first - 1 : last], ordered[first : last + 1]
    widest = int(np.argmax(above - below))
    return float((above[widest] + below[widest]) / 2)
