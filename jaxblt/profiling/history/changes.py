"""Times that changed from one record to another: beyond a threshold, and not by chance.

A time is slower if two things hold: its ratio to the old one exceeds 1 + threshold, and a one-sided Welch test says
that it grew. The level alpha is shared among all times of a record (Bonferroni), so a record without a change fails
with probability alpha at the most. The threshold follows the noise: three times the variation between kept runs, and
never below the floor of the platform.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxblt.profiling.history.baselines import check_same_machine
from jaxblt.profiling.history.times import Record, Timing, platform_of, times_of
from jaxblt.profiling.history.welch import Estimate, welch_of_estimates

FLOORS = {"gpu": 0.02, "cpu": 0.10}
"""The least threshold: a GPU that nothing else uses repeats within 2 %, a CPU shares its caches and clocks."""
REACH = 3.0
"""The threshold in units of the variation between runs."""
FEWEST_RUNS = 3
"""The number of kept runs from which on their variation is used."""
ALPHA = 0.01
"""The probability that a record without a change is called slower."""

Verdict = Literal["slower", "faster", "same"]


class Change(NamedTuple):
    """A time of two records.

    Attributes:
      name: path in the record.
      old, new: seconds.
      threshold: share of the old time that counts as a change.
      p: of the one-sided test in the direction of the change.
      verdict: "slower" is what a gate fails on.
    """

    name: str
    old: float
    new: float
    threshold: float
    p: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old


class Changes(NamedTuple):
    """All times that both records have, and the names that only one has."""

    found: list[Change]
    only_old: list[str]
    only_new: list[str]

    @property
    def slower(self) -> list[Change]:
        """The times that a gate fails on."""
        return [change for change in self.found if change.verdict == "slower"]


def threshold_of(runs: Sequence[float], platform: str) -> float:
    """Return max(floor of the platform, 3 CV), CV being the coefficient of variation of kept medians."""
    if len(runs) < FEWEST_RUNS:
        return FLOORS[platform]
    return max(FLOORS[platform], REACH * float(np.std(runs, ddof=1) / np.mean(runs)))


def find_changes(old: Sequence[Record], new: Record, *, alpha: float = ALPHA) -> Changes:
    """Compare a record with one earlier record, or with the kept ones of its machine.

    Args:
      old: records of the same benchmark and machine, the oldest first. The last says which times there are. From three
        on the mean of their medians is the old time, and their variation is part of its error.
      new: record to judge.
      alpha: probability that a record without a change is called slower.

    Raises:
      ValueError: the records are of different machines or benchmarks, share no time, or one of their times was taken
        by another method.
    """
    for record in old:
        check_same_machine(record, new)
    before, after = [times_of(record) for record in old], times_of(new)
    common = [name for name in before[-1] if name in after]
    if not common:
        raise ValueError(
            f"the records share no time: the old has {[*before[-1]][:3]}, the new {[*after][:3]}"
        )
    platform = platform_of(new)
    found = [
        _judge(
            name,
            [times[name] for times in before if name in times],
            after[name],
            platform,
            alpha / len(common),
        )
        for name in common
    ]
    return Changes(found, sorted(before[-1].keys() - after.keys()), sorted(after.keys() - before[-1].keys()))


def _judge(name: str, old: list[Timing], new: Timing, platform: str, level: float) -> Change:
    if {timing.method for timing in old} != {new.method}:
        raise ValueError(
            f"{name} was timed by {old[-1].method} and now by {new.method}: measure by one method"
        )
    threshold = threshold_of([timing.median for timing in old], platform)
    first, second = _estimates(old, new)
    test = welch_of_estimates(second, first)
    grown, shrunk = second.value / first.value - 1, first.value / second.value - 1
    verdict: Verdict = "same"
    if grown > threshold and test.p_slower < level:
        verdict = "slower"
    elif shrunk > threshold and 1 - test.p_slower < level:
        verdict = "faster"
    p = test.p_slower if grown > 0 else 1 - test.p_slower
    return Change(name, first.value, second.value, threshold, p, verdict)


def _estimates(old: list[Timing], new: Timing) -> tuple[Estimate, Estimate]:
    """Return old and new time; with enough kept runs, their variation between runs is in the old one's error.

    It is the error of a prediction: of the mean of n runs, and of one run more.
    """
    if len(old) < FEWEST_RUNS:
        return old[-1].estimate, new.estimate
    medians = np.array([timing.median for timing in old])
    # Count the variation once: an error on either side would count as twice as many runs, and call chance slower
    error = float(medians.std(ddof=1)) * math.sqrt(1 + 1 / len(old))
    return Estimate(float(medians.mean()), error, len(old)), new.estimate
