"""Values of the last seconds of a running job, and their percentiles."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class WindowReport:
    """Count, mean and percentiles of a monitor's window, in the units of what was recorded."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass
class Monitor:
    """Values of the last `horizon` seconds, for example the step times of a running job.

    Times are those of `time.monotonic` unless given; they must not go backwards.
    """

    horizon: float
    _kept: deque[tuple[float, float]] = field(default_factory=deque, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.horizon > 0:
            raise ValueError(f"horizon must be a positive number of seconds, got {self.horizon}")

    def record(self, value: float, *, at: float | None = None) -> None:
        """Add a value seen at time `at` (seconds; now if absent)."""
        now = time.monotonic() if at is None else at
        self._kept.append((now, value))
        self._expire(now)

    def report(self, *, at: float | None = None) -> WindowReport | None:
        """Report what the window holds at time `at`; None when everything in it has expired."""
        self._expire(time.monotonic() if at is None else at)
        if not self._kept:
            return None
        values = np.array([value for _, value in self._kept])
        p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
        return WindowReport(len(values), float(values.mean()), p50, p95, p99)

    def _expire(self, now: float) -> None:
        while self._kept and self._kept[0][0] < now - self.horizon:
            self._kept.popleft()
