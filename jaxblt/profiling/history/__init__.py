"""Records of earlier runs: kept baselines, times that changed, and trends over many runs.

What measures stands in `jaxblt.profiling`; here nothing runs.
"""

from jaxblt.profiling.history.baselines import check_same_machine, keep, kept
from jaxblt.profiling.history.changes import Change, Changes, find_changes, threshold_of
from jaxblt.profiling.history.times import Timing, read_record, times_of
from jaxblt.profiling.history.trends import Trend, find_trend, trends_of
from jaxblt.profiling.history.welch import Welch, welch

__all__ = [
    "Change",
    "Changes",
    "Timing",
    "Trend",
    "Welch",
    "check_same_machine",
    "find_changes",
    "find_trend",
    "keep",
    "kept",
    "read_record",
    "threshold_of",
    "times_of",
    "trends_of",
    "welch",
]
