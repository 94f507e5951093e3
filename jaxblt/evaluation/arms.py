"""Arms of a comparison, document by document: intervals by the bootstrap, and errors of many tests."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

RESAMPLES = 10_000
WITHIN = 0.05
"""Arms of one size differ in parameters by this share of the base's."""


def compare_arms(
    documents: Mapping[str, Float[np.ndarray, " documents"]],
    base: str,
    *,
    parameters: Mapping[str, int] | None = None,
) -> dict[str, dict[str, float]]:
    """Return how much less than the base each arm needs, paired over documents.

    The unit is that of `documents`, such as bits per byte. `value` is the mean over documents, with its 95 % BCa
    interval (Efron 1987) in `low` and `high`. `p` is of Wilcoxon's test, `q` of Benjamini and Hochberg over all arms:
    of arms with q < .05, 5 % at most have no effect.

    Args:
      documents: by arm, what it needs of each document; means over seeds.
      base: the arm that others are compared with.
      parameters: trained parameters of each arm, which are to be equal within 5 % of the base's; None to not look.

    Raises:
      ValueError: there is no such arm or no other one.
      ValueError: an arm lacks a document's number or is of other documents.
      ValueError: sizes are missing or differ.
    """
    from scipy import stats

    others = [name for name in documents if name != base]
    if base not in documents or not others:
        raise ValueError(f"arms are compared with {base!r}, got {list(documents)}: give it and others")
    _check_documents(documents, np.shape(documents[base]))
    if parameters is not None:
        _check_sizes(parameters, documents, base)
    found = {name: _gain(documents[base] - documents[name]) for name in others}
    adjusted = stats.false_discovery_control([arm["p"] for arm in found.values()])
    return {name: {**arm, "q": float(q)} for (name, arm), q in zip(found.items(), adjusted, strict=True)}


def _check_documents(documents: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless each arm has a finite number for each of the base's documents."""
    for name, needed in documents.items():
        if np.shape(needed) != shape or len(shape) != 1 or not shape[0] or not np.isfinite(needed).all():
            raise ValueError(
                f"arm {name!r} has numbers of shape {np.shape(needed)}, the base {shape}: give a finite one for each "
                "document, of the same documents for all arms"
            )


def _check_sizes(parameters: Mapping[str, int], documents: Mapping[str, Any], base: str) -> None:
    """Raise ValueError unless each arm has a size, and nearly the base's."""
    if missing := documents.keys() - parameters.keys():
        raise ValueError(f"parameters has no size of {sorted(missing)}: give one for each arm, or None")
    size = parameters[base]
    apart = {arm: count for arm, count in parameters.items() if abs(count - size) > WITHIN * size}
    if apart:
        raise ValueError(
            f"parameters {apart} differ from {size} of {base!r} by more than {WITHIN:.0%}: make arms equal"
        )


def _gain(less: Float[np.ndarray, " documents"]) -> dict[str, float]:
    """Return the mean with its interval, and p; the interval of documents that gain alike is only that number."""
    from scipy import stats

    low = high = less[0]
    if np.ptp(less):  # the bootstrap's correction divides by the spread
        drawn = stats.bootstrap((less,), np.mean, n_resamples=RESAMPLES, method="BCa", rng=0, batch=1000)
        low, high = drawn.confidence_interval
    p = stats.wilcoxon(less).pvalue if less.any() else 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return {"value": float(less.mean()), "low": float(low), "high": float(high), "p": float(p)}
