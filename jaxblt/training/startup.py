"""Where the time before the first step goes."""

import time
from dataclasses import dataclass, field


@dataclass
class Startup:
    """Seconds of each stage between a call of `fit` and its first step, in order."""

    stages: dict[str, float] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)

    def done(self, stage: str) -> None:
        """Ends a stage, and begins the next."""
        now = time.perf_counter()
        self.stages[stage], self.since = now - self.since, now

    def line(self) -> str:
        """For people: "first step after 51.0 s: data 1.2, calibration and parameters 14.0, ..."."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self.stages.items())
        return f"first step after {sum(self.stages.values()):.1f} s: {stages}"
