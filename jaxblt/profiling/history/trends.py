"""Trends, drifts and anomalies of a time over the kept runs of one machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxblt.profiling.history.times import Record, times_of
from jaxblt.profiling.history.welch import welch

FEWEST_RUNS = 6
"""The least number of runs for a trend: a window has at least three."""
ALPHA = 0.01
"""The probability that a stationary series is said to have a trend; the same for a drift."""
OUTLYING = 3.5
"""The distance from the trend, in standard deviations, from which on a run is an anomaly."""
_MAD_OF_NORMAL = 0.6745
"""The median absolute deviation of a standard normal distribution."""


@dataclass(frozen=True)
class Trend:
    """The course of a time over runs, the oldest first.

    Attributes:
      runs: how many.
      slope: change from one run to the next, as a share of the median (Theil and Sen).
      slope_p: of Kendall's test that there is no trend.
      drift: mean of the newer window over that of the older one, minus 1.
      drift_p: of Welch's test of the two windows.
      anomalies: places of runs far from the trend, by the median absolute deviation.
    """

    runs: int
    slope: float
    slope_p: float
    drift: float
    drift_p: float
    anomalies: tuple[int, ...]

    @property
    def has_trend(self) -> bool:
        """Whether the slope is no chance."""
        return self.slope_p < ALPHA

    @property
    def has_drift(self) -> bool:
        """Whether the windows differ by more than chance."""
        return self.drift_p < ALPHA


def find_trend(seconds: Sequence[float], *, window: int | None = None) -> Trend:
    """Return trend, drift and anomalies of a series.

    Args:
      seconds: median of each run, the oldest first.
      window: runs of each of the last two windows; half of all runs if None.

    Sources: Sen, JASA 63 (1968); Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993).

    Raises:
      ValueError: fewer than six runs, or windows that do not fit.
    """
    values = np.asarray(seconds, np.float64)
    window = len(values) // 2 if window is None else window
    if len(values) < FEWEST_RUNS or not 2 <= window <= len(values) // 2:
        raise ValueError(
            f"{len(values)} runs and windows of {window}: a trend needs {FEWEST_RUNS} runs, and two windows of at "
            "least 2 that fit into them; keep more runs or take smaller windows"
        )
    from scipy.stats import theilslopes  # here: every command would wait half a second for its import

    slope, intercept = np.array(theilslopes(values))[:2].tolist()
    newer, older = values[-window:], values[-2 * window : -window]
    return Trend(
        runs=len(values),
        slope=slope / float(np.median(values)),
        slope_p=_kendall(values),
        drift=float(newer.mean() / older.mean() - 1),
        drift_p=welch(newer, older).p,
        anomalies=_anomalies(values - intercept - slope * np.arange(len(values))),
    )


def trends_of(records: Sequence[Record], *, window: int | None = None) -> dict[str, Trend]:
    """Return the trend of each time that all records have.

    Raises:
      ValueError: see `find_trend`.
    """
    series = [times_of(record) for record in records]
    common = [name for name in series[-1] if all(name in times for times in series)]
    return {name: find_trend([times[name].median for times in series], window=window) for name in common}


def _kendall(values: np.ndarray) -> float:
    """Return p of Kendall's test; 1 of a constant, of which it says nothing."""
    from scipy.stats import kendalltau

    if not np.ptp(values):
        return 1.0
    return float(np.array(kendalltau(np.arange(len(values)), values))[1])


def _anomalies(residuals: np.ndarray) -> tuple[int, ...]:
    distance = np.abs(residuals - np.median(residuals))
    far = distance > OUTLYING / _MAD_OF_NORMAL * np.median(distance)
    return tuple(int(place) for place in np.flatnonzero(far))
