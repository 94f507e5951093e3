"""Intervals of 95 % of a mean over seeds."""

from collections.abc import Sequence

import numpy as np


def over_seeds(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean of one value a seed with Student's interval; no interval of one seed."""
    from scipy import stats

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return {"value": mean, "low": None, "high": None}
    reach = float(stats.t.ppf(0.975, count - 1) * stats.sem(values))
    return {"value": mean, "low": mean - reach, "high": mean + reach}
