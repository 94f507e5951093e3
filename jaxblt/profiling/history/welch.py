"""Welch's test and the size of an effect: do two samples of times differ, and by how much."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float


class Estimate(NamedTuple):
    """A mean or median with its standard error and the number of samples behind it."""

    value: float
    error: float
    samples: int


@dataclass(frozen=True)
class Welch:
    """Welch's t-test of first - second, with Hedges' g.

    Attributes:
      statistic: t; infinite if neither side has any spread and they differ.
      degrees: of freedom, by Welch and Satterthwaite.
      p: two-sided.
      p_slower: one-sided, small if the first is larger.
      low, high: 95 % interval of the difference, in the samples' unit.
      effect: difference in units of the pooled standard deviation, corrected for small samples.
    """

    statistic: float
    degrees: float
    p: float
    p_slower: float
    low: float
    high: float
    effect: float


def welch(
    first: Sequence[float] | Float[np.ndarray, " n"], second: Sequence[float] | Float[np.ndarray, " m"]
) -> Welch:
    """Return Welch's test of two samples of unequal variance.

    Sources: Welch, Biometrika 34 (1947); Hedges, Journal of Educational Statistics 6 (1981).

    Raises:
      ValueError: a sample has fewer than two values.
    """
    return welch_of_estimates(_mean("first", first), _mean("second", second))


def welch_of_estimates(first: Estimate, second: Estimate) -> Welch:
    """Return Welch's test of two estimates with standard errors of their own."""
    difference = first.value - second.value
    parts = np.array([first.error**2 / (first.samples - 1), second.error**2 / (second.samples - 1)])
    error = math.hypot(first.error, second.error)
    if error == 0:  # two constants: the distribution of their difference is a point
        return _of_constants(difference, first.samples + second.samples - 2)
    degrees = float(error**4 / (first.error**2 * parts[0] + second.error**2 * parts[1]))
    from scipy import special  # here, as runs compare nothing

    t, reach = difference / error, float(special.stdtrit(degrees, 0.975)) * error
    p_slower = float(special.stdtr(degrees, -t))
    return Welch(
        t,
        degrees,
        2 * float(special.stdtr(degrees, -abs(t))),
        p_slower,
        difference - reach,
        difference + reach,
        difference / _pooled(first, second) * _small_sample(first.samples + second.samples - 2),
    )


def _mean(which: str, samples: Sequence[float] | Float[np.ndarray, " n"]) -> Estimate:
    values = np.asarray(samples, np.float64)
    if values.size < 2:
        raise ValueError(f"the {which} sample has {values.size} values: Welch's test needs at least two")
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(values.size)), values.size)


def _pooled(first: Estimate, second: Estimate) -> float:
    """Return the pooled standard deviation of the samples."""
    squares = [side.error**2 * side.samples * (side.samples - 1) for side in (first, second)]
    return math.sqrt(sum(squares) / (first.samples + second.samples - 2))


def _small_sample(degrees: int) -> float:
    """Return the factor that frees the effect's size of its bias."""
    return 1 - 3 / (4 * degrees - 1)


def _of_constants(difference: float, degrees: int) -> Welch:
    signed = math.copysign(math.inf, difference) if difference else 0.0
    p_slower = 0.5 if not difference else float(difference < 0)
    return Welch(signed, degrees, float(not difference), p_slower, difference, difference, signed)
