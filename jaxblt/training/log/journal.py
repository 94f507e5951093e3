"""What a run tells while it trains: figures, lines, texts and pictures, each where it belongs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import jax

from jaxblt.data.labelled import classes_of
from jaxblt.show import show
from jaxblt.training.evaluate import Validation
from jaxblt.training.flops import peak_flops
from jaxblt.training.log.continuations import NAME as SAMPLE
from jaxblt.training.log.continuations import Continuation, continuation_of
from jaxblt.training.log.health import spans
from jaxblt.training.log.hosted_trackers import open_trackers
from jaxblt.training.log.meter import Cost, Meter
from jaxblt.training.log.pictures import first_passage, log_confusion, log_passage
from jaxblt.training.log.report import describe, known_costs
from jaxblt.training.log.runlog import Progress, RunLog
from jaxblt.training.log.trackers import Tracker, hyperparameters_of
from jaxblt.training.metrics import Metrics, as_scalars
from jaxblt.training.objectives.label_scores import CONFUSION
from jaxblt.training.start.begin import Begun
from jaxblt.training.start.setup import Setup
from jaxblt.training.state import TrainState

HEADLINE = (
    "bits_per_byte",
    "accuracy",
    "rmse",
    "learning_rate",
    "grad_norm",
    "bytes_per_patch",
    "bytes_per_second",
    "mfu",
    "skipped",
)
"""Figures shown beside the progress bar."""


@dataclass(frozen=True)
class Journal:
    """The log, the progress bar and the meter of a run.

    Attributes:
      setup: of the run.
      log, progress, meter: where figures and lines go, and what measures speed.
      costs: of a byte and a patch, by length of row.
      continuation: makes the text that each evaluation logs; None for none.
      report: on what is about to run.
    """

    setup: Setup
    log: RunLog
    progress: Progress
    meter: Meter
    costs: dict[int, Cost]
    continuation: Continuation | None
    report: str

    __repr__ = show

    def begin(self, first: int) -> None:
        """Begin the log at a step, with the recipe and the report on what is about to run."""
        self.log.truncate_after(first)
        self.log.hyperparameters(hyperparameters_of(self.setup.recipe))
        self.log.text(first, "report", f"```\n{self.report}\n```")
        self.progress.say(f"{self.report}\n" + (f"\ngoing on from step {first}" if first else ""))

    def write_step(self, metrics: Metrics, step: int, skipped: list[int]) -> dict[str, float]:
        """Fetch a step's metrics and log them with the meter's; return those of the step.

        Args:
          metrics: on the devices.
          step: of the metrics.
          skipped: steps since the last call that were not finite.
        """
        fetched = as_scalars(metrics)
        if skipped:
            self.log.steps(step, "skipped_steps", skipped)
            self.progress.say(f"not finite in loss, gradient or update, and skipped: steps {spans(skipped)}")
        figures = fetched | self.meter.read(fetched)
        self.log.scalars(step, figures)
        shown = (*HEADLINE, *getattr(self.setup.recipe.objective, "headlines", ()))
        self.progress.update(step, {name: figures[name] for name in shown if name in figures})
        return fetched

    def write_figures(self, found: Mapping[str, float], validation: Validation, step: int) -> None:
        """Log the figures of an evaluation, and pictures of which classes were confused."""
        self.log.scalars(step, {f"validation/{name}": value for name, value in found.items()})
        for name, counts in validation.found.totals.items():
            if name.rpartition("/")[2] == CONFUSION:
                classes = classes_of(self.setup.recipe.data, name.rpartition("/")[0])
                log_confusion(self.log, self.progress, step, counts, classes, name)

    def tell_evaluation(
        self, found: Mapping[str, float], figure: str, validation: Validation, state: TrainState, step: int
    ) -> None:
        """Log what the model makes follow, and say the figure that the run is judged by, of each source too."""
        parts = [f"{source}/{figure}" for source in validation.data.source_names]
        parts += getattr(self.setup.recipe.objective, "headlines", ())
        each = [f"{name.partition('/')[0]} {found[name]:.4f}" for name in parts if name in found]
        told = f" ({', '.join(each)})" if each else ""
        if self.continuation is not None:
            self.log.text(step, SAMPLE, self.continuation(state, validation.data))
        self.progress.say(f"step {step}: validation {found[figure]:.4f} {figure.replace('_', ' ')}{told}")

    def draw_patches(self, validation: Validation, state: TrainState, step: int) -> None:
        """Log a picture of the first validation passage's patches."""
        passage = first_passage(self.setup, state.frozen, validation.data)
        if passage is not None:
            log_passage(self.log, self.progress, step, passage)


@contextmanager
def open_journal(
    run_dir: str | os.PathLike[str], begun: Begun, trackers: Sequence[Tracker]
) -> Iterator[Journal]:
    """Open the log of a run; nothing is written to the folder before that.

    Args:
      run_dir: folder of the run.
      begun: the run.
      trackers: of one's own.
    """
    setup, data, is_main = begun.setup, begun.data, jax.process_index() == 0
    recipe, full = setup.recipe, setup.recipe.data.seq_len
    costs = known_costs(begun.train_step.kept, setup, data)
    report = describe(setup, data, begun.train_step.choices, costs[full])
    peak = peak_flops(jax.devices()[0].device_kind)
    seconds = begun.meta["seconds"]
    meter = Meter(costs[full], None if peak is None else peak * setup.mesh.size, seconds=seconds)
    continuation = continuation_of(recipe)
    opened = partial(open_trackers, recipe.train.trackers, trackers)
    with (
        RunLog(run_dir, is_main=is_main, trackers=opened) as log,
        log.progress(recipe.train.steps, start=begun.first) as progress,
    ):
        yield Journal(setup, log, progress, meter, costs, continuation, report)
