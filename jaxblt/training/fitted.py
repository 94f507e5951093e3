"""What a training leaves in the caller's hands."""

from dataclasses import dataclass, field

import jax

from jaxblt.training.log.journal import HEADLINE
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import TrainState


@dataclass(frozen=True)
class Fitted:
    """A run that ended.

    Attributes:
      recipe: with nothing left open.
      state: the last one.
      step: steps taken.
      finished: False if the run was stopped by a signal or its time limit; fitting again goes on.
      validation: figures of the last evaluation in this process; empty if there was none.
      timed_out: True if its time limit ended it before its last step.
    """

    recipe: Recipe
    state: TrainState
    step: int
    finished: bool
    validation: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False

    def __repr__(self) -> str:
        """Write what a notebook shows: no parameters, which alone would fill pages."""
        recipe, told = self.recipe, "" if self.finished else ", stopped"
        lines = [f"Fitted {recipe.name!r} at step {self.step:,} of {recipe.train.steps:,}{told}"]
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        lines.append(f"  model       {type(recipe.model).__name__}, {count:,} trained parameters")
        figures = {name: value for name, value in self.validation.items() if name in HEADLINE}
        if figures:
            lines.append(
                "  validation  " + ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            )
        return "\n".join(lines)
