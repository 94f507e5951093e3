"""The train loop: reads top to bottom, from devices to the last checkpoint."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.data.sources import DocumentSource
from jaxblt.show import show
from jaxblt.training.best import Standing, followed
from jaxblt.training.cadence import SaveCadence
from jaxblt.training.evaluate import Validation
from jaxblt.training.health import BadSteps, check_health
from jaxblt.training.log.hosted_trackers import check_trackers
from jaxblt.training.log.journal import HEADLINE, Journal, open_journal
from jaxblt.training.log.meter import traced
from jaxblt.training.log.runlog import Progress
from jaxblt.training.log.trackers import Tracker
from jaxblt.training.metrics import Metrics
from jaxblt.training.preemption import StopRequest, Vote
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.begin import begin, check_same_data, write_folder
from jaxblt.training.start.setup import (
    Setup,
    entropy_history,
    open_data,
    recipe_step,
    to_devices,
)
from jaxblt.training.start.startup import Startup, keep_compiled
from jaxblt.training.state import TrainState, forgive, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.folder import claimed
from jaxblt.training.stored.remote_run import trained_in
from jaxblt.training.stored.resolved import checkpoint_dir


@dataclass(frozen=True)
class Fitted:
    """A run that ended.

    Attributes:
      recipe: with nothing left open.
      state: the last one.
      step: steps taken.
      finished: False if the run was stopped by a signal or its time limit; fitting again goes on.
      validation: figures of the last evaluation in this process; empty if there was none.
    """

    recipe: Recipe
    state: TrainState
    step: int
    finished: bool
    validation: dict[str, float] = field(default_factory=dict)

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


def fit(
    recipe: Recipe,
    run_dir: str | os.PathLike[str],
    *,
    source: DocumentSource | None = None,
    devices: Any = None,
    resume_with: bool = False,
    trackers: Sequence[Tracker] = (),
) -> Fitted:
    """Train a recipe in a folder, from the start or from where an earlier process left off.

    Leaves `config.json` (the resolved recipe), `metrics.jsonl`, TensorBoard events and `checkpoints/`; in `frozen/` the
    frozen trees that the run has; and in `configs/` the configs that it had before it went on with another. A run that
    is finished is left as it is. A start that fails leaves no folder that was not there, and changes none that was.

    SIGTERM or Ctrl-C saves and ends the run after two steps at most, or three where several processes train; a second
    one changes nothing, a third ends the process.

    Args:
      recipe: what to train.
      run_dir: a local folder, seen by all processes. Another trainer cannot use it meanwhile. Or one on `s3://` or
        `gs://`, of a run of one process: then the run trains in a temporary copy, uploaded every 30 s and at the end.
      source: documents to use instead of those that the recipe names.
      devices: by default all.
      resume_with: the folder's run goes on with this recipe although settings differ that decide what is learned,
        such as data, optimiser, seed, length or batch (`resolved.adopt`), or the data have changed.
      trackers: of your own, besides those that the recipe names; closed at the end. One process calls them.

    Raises:
      ImportError: the package of a tracker that the recipe names is missing.
      TrainingFailed: too many steps in a row were not finite, or too many patch boundaries were refused.
      FolderInUse: another process trains in the folder.
      ValueError: the recipe does not fit the devices, the data or the run that the folder holds.
      FileNotFoundError: the folder holds checkpoints without the config that they belong to.
      OSError: the disk is full.
    """
    with trained_in(run_dir) as folder:
        return _fit(recipe, folder, str(run_dir), source, devices, resume_with, trackers)


def _fit(
    recipe: Recipe,
    run_dir: Path,
    called: str,
    source: DocumentSource | None,
    devices: Any,
    resume_with: bool,
    trackers: Sequence[Tracker],
) -> Fitted:
    """Train in a local folder, which messages call something else if it is a copy."""
    startup = Startup()
    check_trackers(recipe.train.trackers)
    mesh, is_main = recipe.mesh.build(devices), jax.process_index() == 0
    keep_compiled(recipe.train.compilation_cache)
    with (
        # The outermost: signals must find no default handler before everything is closed.
        ExitStack() as closed_last,
        claimed(run_dir, is_main=is_main),
        jax.set_mesh(mesh),
        Checkpointer(checkpoint_dir(run_dir), keep=recipe.train.keep) as checkpoints,
    ):
        data = open_data(recipe, mesh, source=source)
        startup.done("data")
        setup, state, first, meta = begin(recipe, run_dir, data, mesh, checkpoints, resume_with=resume_with)
        standing = standing_of(setup.recipe, meta)
        if first >= setup.recipe.train.steps or standing.exhausted:
            return already_finished(setup, state, first, called)
        if not resume_with:
            check_same_data(meta, data, called)
        checkpoints.best = lambda: standing.steps if setup.recipe.train.keep_best else ()
        data = replace(data, history=entropy_history(setup.recipe))
        startup.done("calibration and parameters")

        train_step = recipe_step(setup)
        example = to_devices(data.batch(first), mesh, recipe.data.batch_size, setup.layout)
        validation, call = Validation(setup, source), (train_step, state, example)
        options = {"first": first, "seconds": meta["seconds"], "trackers": trackers}
        # Up to here a start may fail, and while the journal is opened: nothing before this block writes to the folder.
        with open_journal(run_dir, setup, data, call, **options) as journal:
            startup.done("tracing")
            stop = closed_last.enter_context(StopRequest())
            write_folder(run_dir, setup.recipe, state, first, is_main=is_main)
            journal.begin(first)
            trainer = Trainer(
                *(setup, data, train_step, validation, standing, checkpoints, journal, stop, startup)
            )
            return trainer.run(state, first)


def already_finished(setup: Setup, state: TrainState, step: int, run_dir: str) -> Fitted:
    """Say that the run is finished; nothing is trained or written."""
    steps, why = setup.recipe.train.steps, ""
    if step < steps:
        why = ", and its evaluations no longer improved (train.patience)"
    with Progress(steps, start=step, show=jax.process_index() == 0) as progress:
        progress.say(f"{run_dir} is finished: it is at step {step} of {steps}{why}; nothing was changed")
    return Fitted(setup.recipe, state, step, finished=True)


def standing_of(recipe: Recipe, meta: dict[str, Any]) -> Standing:
    """Return how the run's evaluations compare so far."""
    train, (figure, higher) = recipe.train, followed(recipe)
    meta = {"best_by": recipe.objective.headline} | meta  # older versions compared nothing else
    return Standing(train.keep_best, train.patience, higher=higher, meta=meta, figure=figure)


@dataclass(frozen=True)
class Trainer:
    """The loop itself, with everything it talks to, and shapes compiled for.

    Metrics stay on the devices between log lines. Two steps at most are in flight.
    """

    setup: Setup
    data: Dataset
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    validation: Validation
    standing: Standing
    checkpoints: Checkpointer
    journal: Journal
    stop: StopRequest
    startup: Startup
    compiled: set[tuple[int, ...]] = field(default_factory=set)
    in_flight: deque[Metrics] = field(default_factory=deque)

    __repr__ = show

    def run(self, state: TrainState, first: int) -> Fitted:
        """Step from `first` to the recipe's last, or until a signal or the time limit; save before returning."""
        train, step, stopped, drawn = self.setup.recipe.train, first, False, False
        validated: dict[str, float] = {}
        saves, vote = SaveCadence(train.checkpoint_every, train.checkpoint_every_s), Vote()
        bad = BadSteps(train.max_skips)
        with (
            closing(self.data.iterator(first)) as batches,
            traced(Path(self.journal.log.run_dir) / "profile", train.profile_steps) as trace,
        ):
            if train.eval_start and not self.checkpoints.steps():
                validated = self.validate(state, step)
                if train.keep_best:
                    self.save(state, step, saves, leaving=False)
            while step < train.steps and not stopped and not self.standing.exhausted:
                trace(step)
                state, metrics = self.advance(state, batches, step)
                step += 1
                last = step == train.steps
                bad.add(step, metrics)
                if step % train.log_every == 0 or last:
                    self.write(metrics, step, bad)
                paused, best = time.perf_counter(), False
                if train.eval_every and (step % train.eval_every == 0 or last):
                    if not drawn:
                        self.draw(state, step)
                        drawn = True
                    validated = self.validate(state, step)
                    best = train.keep_best > 0 and step in self.standing.steps
                    last = last or self.standing.exhausted
                if self.out_of_time:
                    self.stop.set()
                asked, wanted = vote(self.stop.here, saves.wanted)
                stopped = bool(asked)
                self.checkpoints.check()
                if saves.due(step, wanted) or best or last or stopped:
                    self.save(state, step, saves, leaving=last or stopped)
                self.journal.meter.pause(paused)
        self.checkpoints.wait()
        finished = step >= train.steps or self.standing.exhausted
        if self.standing.exhausted:
            self.journal.progress.say(
                f"ended at step {step}: {self.standing.since} evaluations in a row were no better"
            )
        if finished:
            self.journal.progress.say(
                f"finished at step {step}; next: jaxblt evaluate {self.journal.log.run_dir}"
            )
        else:
            told = "fit again to go on, or repeat the jaxblt command"
            if self.out_of_time:  # the same command would train one step and stop again
                told = (
                    f"train.time_limit_s = {train.time_limit_s:g} counts all {self.journal.meter.seconds:.0f} s of the "
                    "run: raise it to go on"
                )
            self.journal.progress.say(f"stopped and saved at step {step} of {train.steps}; {told}")
        return Fitted(self.setup.recipe, state, step, finished, validated)

    @property
    def out_of_time(self) -> bool:
        """Whether the run has trained for as long as it may."""
        limit = self.setup.recipe.train.time_limit_s
        return limit is not None and self.journal.meter.seconds > limit

    def advance(self, state: TrainState, batches: Iterator[Batch], step: int) -> tuple[TrainState, Metrics]:
        """Hand the devices one step, and wait until they have no other; for the step itself only if it is compiled."""
        asked = time.perf_counter()
        local = next(batches)
        waited = time.perf_counter() - asked
        batch = to_devices(local, self.setup.mesh, self.data.config.batch_size, self.setup.layout)
        compiled, first = local.inputs.shape in self.compiled, not self.compiled
        self.compiled.add(local.inputs.shape)
        guard = "disallow" if compiled else "allow"
        if not compiled:
            self.journal.progress.compiling(local.inputs.shape[1])
        with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard(guard):
            state, metrics = self.train_step(state, batch)
        # Keep the queue short: a signal, or the error of a step, waits for all that is in it
        self.in_flight.append(metrics)
        if len(self.in_flight) > 1:
            jax.block_until_ready(self.in_flight.popleft())
        self.journal.meter.cost = self.journal.costs.get(local.inputs.shape[1], self.journal.meter.cost)
        if compiled:
            self.journal.meter.add(int(np.count_nonzero(local.segment_ids)) * self.data.process_count, waited)
        else:
            jax.block_until_ready(metrics)
            self.journal.progress.compiled(step + 1)
            if first:
                self.startup.done("compiling and the first step")
                self.journal.progress.say(self.startup.line())
            self.journal.meter.restart()
        return state, metrics

    def save(self, state: TrainState, step: int, saves: SaveCadence, *, leaving: bool) -> None:
        """Save, but not amid steps that are not finite: what led to them must not displace older checkpoints.

        Where the run is left the state is saved all the same: it is that of the last good step, further on.
        """
        if leaving or not int(state.skipped_in_a_row):
            noted = self.standing.meta | {"seconds": self.journal.meter.seconds, "data": self.data.extent}
            self.checkpoints.save(step, without_frozen(forgive(state)), noted)
            saves.saved()

    def write(self, metrics: Metrics, step: int, bad: BadSteps) -> None:
        """Log a step's metrics, and raise TrainingFailed where going on would waste the run."""
        check_health(self.journal.write_step(metrics, step, bad.fetch()), step, self.setup.recipe)

    def validate(self, state: TrainState, step: int) -> dict[str, float]:
        """Score the validation split and log it."""
        found, figure = self.validation(state), self.standing.figure
        self.journal.write_figures(found, self.validation, step)
        if figure not in found:
            raise ValueError(
                f"the validation split gives no {figure}, which runs are compared by: hold out more records, or set "
                "train.best_by to another figure"
            )
        self.standing.note(found[figure], step)
        self.journal.tell_evaluation(found, figure, self.validation, state, step)
        return found

    def draw(self, state: TrainState, step: int) -> None:
        """Log a picture of the first validation passage's patches.

        What cuts them is frozen, so one a process is enough: a later one would be the same.
        """
        self.journal.draw_patches(self.validation, state, step)
