"""Whether a run is worth going on with: steps that were not finite, and patch boundaries that found no slot."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxblt.models.blt import ROUTER
from jaxblt.training.metrics import Metrics
from jaxblt.training.recipe import Recipe

CUT_RATE = f"{ROUTER}/cut_rate"
"""The metric that says at which share of bytes a router wants patches to end."""
FACTOR = 5
"""How far that share may go from the target's, either way."""


class TrainingFailed(RuntimeError):
    """A run cannot go on: its steps are not finite, its patches overflow, or its router cuts at a rate far off."""


class BadSteps:
    """The steps that were not finite. What tells them stays on the devices until it is fetched with a log line."""

    def __init__(self, max_skips: int) -> None:
        self.max_skips = max_skips
        self._counts: dict[int, Any] = {}

    def add(self, step: int, metrics: Metrics) -> None:
        """Note a step's metrics."""
        self._counts[step] = metrics["skipped_in_a_row"]

    def fetch(self) -> list[int]:
        """Return those among the steps added since the last call that were not finite."""
        counts, self._counts = jax.device_get(self._counts), {}
        # Beyond max_skips in a row every step is skipped, finite or not.
        return [step for step, count in counts.items() if 0 < count <= self.max_skips]


def spans(steps: Sequence[int]) -> str:
    """Write ascending numbers as text: `[3, 4, 5, 9]` is "3-5, 9"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs)


def check_health(metrics: dict[str, float], step: int, recipe: Recipe) -> None:
    """Raise TrainingFailed if too many steps in a row were not finite, or too many patch boundaries refused.

    Learned boundaries may also have left the target's rate 1/N by a factor of five, once the warm-up is over.
    """
    train, skipped = recipe.train, int(metrics["skipped_in_a_row"])
    if skipped >= train.max_skips:
        first = step - skipped + 1
        which = f"steps {spans(range(first, first + train.max_skips))}"
        if metrics.get("scored_bytes") == 0:
            raise TrainingFailed(
                f"{which} had no target to learn (train.max_skips = {train.max_skips}): look at data.scored, whose "
                "letters have a case, and at the data's labels or answers"
            )
        raise TrainingFailed(
            f"{which} were not finite in loss, gradient or update "
            f"(train.max_skips = {train.max_skips}); none of them changed the parameters. Lower "
            "optimizer.learning_rate or clip_norm, or look at the data; fitting again goes on from the last checkpoint"
        )
    if metrics.get("overflow", 0.0) > train.max_overflow:
        raise TrainingFailed(
            f"at step {step} {metrics['overflow']:.1%} of patch boundaries found no slot (train.max_overflow = "
            f"{train.max_overflow:.1%}): raise patcher.capacity or threshold, or leave capacity None to calibrate it"
        )
    _check_cut_rate(metrics, step, recipe)


def _check_cut_rate(metrics: dict[str, float], step: int, recipe: Recipe) -> None:
    rate, target = metrics.get(CUT_RATE), recipe.bytes_per_patch
    if rate is None or target is None or step <= recipe.optimizer.warmup_steps:
        return
    if not 1 / (FACTOR * target) <= rate <= FACTOR / target:
        raise TrainingFailed(
            f"at step {step} the router ends patches at {rate:.2%} of bytes, and bytes_per_patch = {target:g} asks for "
            f"{1 / target:.2%}, within a factor of {FACTOR}: raise model.router.ratio_weight, or lower "
            "optimizer.learning_rate"
        )
