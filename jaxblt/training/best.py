"""How a run's evaluations compare: the best so far, and how many in a row were no better."""

from collections.abc import Collection, Mapping
from typing import Any


class Standing:
    """The best evaluations of a run.

    Args:
      keep: how many of the best to remember; at least the best one is.
      patience: evaluations in a row without a better one after which the run ends; None for never.
      higher: whether a higher figure is better.
      meta: what an earlier process stored, as `meta` gives it.
    """

    def __init__(self, keep: int, patience: int | None, *, higher: bool, meta: Mapping[str, Any]) -> None:
        self.keep, self.patience, self.higher = max(keep, 1), patience, higher
        self.best = [(float(value), int(step)) for value, step in meta.get("best", ())]
        self.since = int(meta.get("since_best", 0))

    def note(self, value: float, step: int) -> None:
        """Notes the evaluation after a step."""
        leader = self.best[0][0] if self.best else None
        better = leader is None or (value > leader if self.higher else value < leader)
        self.since = 0 if better else self.since + 1
        # of equal figures the earlier one counts as better
        ranked = sorted(
            [*self.best, (value, step)], key=lambda one: (-one[0] if self.higher else one[0], one[1])
        )
        self.best = ranked[: self.keep]

    @property
    def steps(self) -> Collection[int]:
        """The steps of the best evaluations, the best one first."""
        return [step for _, step in self.best]

    @property
    def exhausted(self) -> bool:
        """Whether so many evaluations in a row were no better that the run is to end."""
        return self.patience is not None and self.since >= self.patience

    @property
    def meta(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {"best": [list(one) for one in self.best], "since_best": self.since}
