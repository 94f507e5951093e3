"""The growth of time and memory with length, and the length at which two curves cross."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def exponent(lengths: Sequence[int], values: Sequence[float], *, first: int) -> dict[str, Any] | None:
    """Return the slope of log values over log length from `first` tokens on; None below three lengths.

    The interval is Student's: what it spans are departures of the values, such as median seconds, from a straight line.
    It is a point where values are exact and on that line.
    """
    from scipy import stats

    chosen = [(n, s) for n, s in zip(lengths, values, strict=True) if n >= first]
    if len(chosen) < 3:
        return None
    x, y = np.log2(np.array(chosen)).T
    if not np.ptp(y):  # rounding would give a constant a slope, and 0 / 0 for its error
        return {"value": 0.0, "low": 0.0, "high": 0.0, "from": first}
    fit: Any = stats.linregress(x, y)
    slope, reach = float(fit.slope), float(stats.t.ppf(0.975, len(chosen) - 2) * fit.stderr)
    return {"value": slope, "low": slope - reach, "high": slope + reach, "from": first}


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return length from which the ratio stays above 1, interpolated between logarithms.

    None where it does not end above 1, or there is no length; the first length where all ratios are above 1.

    Args:
      lengths: rising.
      ratios: of a time to another's.
    """
    if not ratios:
        return None
    below = [i for i, ratio in enumerate(ratios) if ratio <= 1]
    if not below:
        return float(lengths[0])
    i = below[-1]
    if i + 1 == len(lengths):
        return None
    x, y = np.log2(lengths[i : i + 2]), np.log2(ratios[i : i + 2])
    return float(2 ** (x[0] - y[0] * (x[1] - x[0]) / (y[1] - y[0])))
