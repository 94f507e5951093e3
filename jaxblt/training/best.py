"""How a run's evaluations compare: the best so far, and how many in a row were no better."""

from collections.abc import Collection, Mapping
from typing import Any

HIGHER = (
    "accuracy",
    "row_accuracy",
    "mcc",
    "f1",
    "auroc",
    "auprc",
    "pearson",
    "spearman",
    "bytes_per_second",
    "mfu",
)
"""Figures that are better if higher, whatever stands before them: "validation/", "task/"."""


def is_better_higher(figure: str) -> bool:
    """Return whether a higher value of a figure is better."""
    return figure.rpartition("/")[2] in HIGHER


def followed(recipe: Any) -> tuple[str, bool]:
    """Return the figure of evaluations that a run is judged by, and whether a higher one is better."""
    objective, figure = recipe.objective, recipe.train.best_by
    if figure is None:
        return objective.headline, objective.higher_is_better
    return figure, is_better_higher(figure)


def standing_of(recipe: Any, meta: Mapping[str, Any]) -> "Standing":
    """Return how the run's evaluations compare so far, from what an earlier process stored."""
    train, (figure, higher) = recipe.train, followed(recipe)
    meta = {"best_by": recipe.objective.headline} | dict(meta)  # Earlier versions compared nothing else
    return Standing(train.keep_best, train.patience, higher=higher, meta=meta, figure=figure)


def check_followed(recipe: Any) -> None:
    """Raise ValueError unless the objective has the figure `train.best_by`."""
    figure, names = recipe.train.best_by, recipe.objective.figure_names
    if figure is not None and figure not in names:
        raise ValueError(
            f"train.best_by = {figure!r} is no figure of {type(recipe.objective).__name__}: take one of "
            f"{', '.join(names)}"
        )


class Standing:
    """The best evaluations of a run.

    Args:
      keep: how many of the best to remember; at least the best one is.
      patience: evaluations in a row without a better one after which the run ends; None for never.
      higher: whether a higher figure is better.
      meta: what an earlier process stored, as `meta` gives it; forgotten if it was of another figure.
      figure: what is compared.
    """

    def __init__(
        self, keep: int, patience: int | None, *, higher: bool, meta: Mapping[str, Any], figure: str
    ) -> None:
        self.keep, self.patience, self.higher, self.figure = max(keep, 1), patience, higher, figure
        if meta.get("best_by", figure) != figure:
            meta = {}
        self.best = [(float(value), int(step)) for value, step in meta.get("best", ())]
        self.since = int(meta.get("since_best", 0))

    def note(self, value: float, step: int) -> None:
        """Note the evaluation after a step."""
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
        """The standing as JSON, for a checkpoint."""
        best = [list(one) for one in self.best]
        return {"best": best, "since_best": self.since, "best_by": self.figure}
