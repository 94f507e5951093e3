"""How time grows with length, and where two curves cross."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def exponent(lengths: Sequence[int], seconds: Sequence[float], *, first: int) -> dict[str, Any] | None:
    """Slope of log seconds over log length from `first` tokens on, with its 95 % interval; None below three lengths.

    The interval is Student's: what it spans are departures of the medians from a straight line.
    """
    from scipy import stats

    chosen = [(n, s) for n, s in zip(lengths, seconds, strict=True) if n >= first]
    if len(chosen) < 3:
        return None
    x, y = np.log2(np.array(chosen)).T
    fit: Any = stats.linregress(x, y)
    reach = float(stats.t.ppf(0.975, len(chosen) - 2) * fit.stderr)
    return {"value": float(fit.slope), "low": fit.slope - reach, "high": fit.slope + reach, "from": first}


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Length from which the ratio stays above 1, interpolated between logarithms.

    None where it does not end above 1; the first length where all ratios are above 1.

    Args:
      lengths: rising.
      ratios: of a time to another's.
    """
    below = [i for i, ratio in enumerate(ratios) if ratio <= 1]
    if not below:
        return float(lengths[0])
    i = below[-1]
    if i + 1 == len(lengths):
        return None
    x, y = np.log2(lengths[i : i + 2]), np.log2(ratios[i : i + 2])
    return float(2 ** (x[0] - y[0] * (x[1] - x[0]) / (y[1] - y[0])))
