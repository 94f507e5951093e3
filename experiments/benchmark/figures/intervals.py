"""Intervals of 95 %: of a share of answers, and of a mean over seeds."""

from collections.abc import Sequence

import numpy as np


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Return ends of the interval of a share, which `right` of `asked` were seen of.

    Source: Wilson, JASA 22 (1927); unlike the normal one it stays inside 0..1 and is no point at either end.
    """
    from scipy import stats

    found = stats.binomtest(right, asked).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of one value a seed with Student's interval; no interval of one seed."""
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return {"value": mean, "low": None, "high": None}
    reach = float(stats.t.ppf(0.975, count - 1) * stats.sem(values))
    return {"value": mean, "low": mean - reach, "high": mean + reach}
