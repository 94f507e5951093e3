"""Arms compared document by document: bits per byte where, intervals by the bootstrap, errors of many tests."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

RESAMPLES = 10_000
DISTANCES = (0, 16, 64, 256, 1024)
"""Bytes of a span before a target, from which its bits are counted together."""


def bits_by(nats: np.ndarray, group: np.ndarray, count: int) -> list[float | None]:
    """Return mean bits of the targets of each group; None for one without a target."""
    sums = np.bincount(group.ravel(), nats.ravel(), count)
    numbers = np.bincount(group.ravel(), minlength=count)
    return [float(s / n / np.log(2)) if n else None for s, n in zip(sums, numbers, strict=True)]


def by_distance(nats: np.ndarray, since: np.ndarray, length: int) -> dict[str, float | None]:
    """Return bits per byte by how long ago the domain changed; the beginnings of rows are no changes."""
    changed = since < np.arange(1, length + 1)[None]
    group = np.searchsorted(DISTANCES, since, side="right") - 1
    found = bits_by(nats[changed], group[changed], len(DISTANCES))
    names = [f"{low}-{high}" for low, high in pairwise(DISTANCES)]
    return dict(zip([*names, f"{DISTANCES[-1]}-"], found, strict=True))


def difference(arm: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Return bits per byte that an arm needs less than another, with its 95 % BCa interval, and Wilcoxon's p.

    Where every document gains as much as the others the interval is only that number, and p is 1 if it is 0.

    Args:
      arm, other: bits per byte of each document.
    """
    from scipy import stats

    less = other - arm
    low = high = less[0]
    if np.ptp(less):  # the bootstrap's correction divides by the spread
        found = stats.bootstrap((less,), np.mean, n_resamples=RESAMPLES, method="BCa", rng=0, batch=1000)
        low, high = found.confidence_interval
    p = stats.wilcoxon(less).pvalue if less.any() else 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return {"value": float(less.mean()), "low": float(low), "high": float(high), "p": float(p)}


def gap_closed(arm: np.ndarray, static: np.ndarray, oracle: np.ndarray) -> dict[str, float]:
    """Return (static - arm) / (static - oracle) of the means over documents, with its 95 % BCa interval (Efron 1987).

    Args:
      arm, static, oracle: bits per byte of each document; documents are drawn again, all three together.
    """
    from scipy import stats

    def share(static: np.ndarray, arm: np.ndarray, oracle: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean(static - arm, axis) / np.mean(static - oracle, axis)

    found = stats.bootstrap(
        (static, arm, oracle),
        share,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="BCa",
        rng=0,
        batch=1000,
    )
    interval = found.confidence_interval
    return {
        "value": float(share(static, arm, oracle)),
        "low": float(interval.low),
        "high": float(interval.high),
    }


def compared(documents: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Compare every arm with the static one, and return the share of the oracle's gap that it closes, if any.

    Where the interval of what the oracle needs less than the static arm reaches 0, there is no gap to close a share of.

    Args:
      documents: by arm, bits per byte of each document, means over seeds.
    """
    if "static" not in documents:
        return {}
    static, oracle = documents["static"], documents.get("oracle")
    less = less_than_static(documents)
    found: dict[str, Any] = {"less_than_static": less}
    if oracle is not None:
        routed = [name for name in less if name != "oracle" and less["oracle"]["low"] > 0]
        found["gap_closed"] = {name: gap_closed(documents[name], static, oracle) for name in routed}
    return found


def less_than_static(figures: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return what each arm needs less than the static one, with interval, p, and q over all arms.

    q is of Benjamini and Hochberg.

    Args:
      figures: by arm, of each document, means over seeds: bits per byte.
    """
    from scipy import stats

    static = figures.get("static")
    if static is None or len(figures) == 1:
        return {}
    less = {name: difference(found, static) for name, found in figures.items() if name != "static"}
    adjusted = stats.false_discovery_control([arm["p"] for arm in less.values()])
    return {name: {**arm, "q": float(q)} for (name, arm), q in zip(less.items(), adjusted, strict=True)}
