"""The loop of steps, evaluations and saves, from a first step to the last checkpoint."""

import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.data.sources import DocumentSource
from jaxblt.show import show
from jaxblt.training.best import Standing
from jaxblt.training.evaluate import Validation
from jaxblt.training.log.health import BadSteps, check_health
from jaxblt.training.log.journal import HEADLINE, Journal
from jaxblt.training.log.meter import traced
from jaxblt.training.log.runlog import Progress
from jaxblt.training.metrics import Metrics
from jaxblt.training.preemption import StopRequest, Vote
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.begin import Begun
from jaxblt.training.start.boundaries import with_target_length
from jaxblt.training.start.setup import Setup, to_devices
from jaxblt.training.start.startup import Startup
from jaxblt.training.state import TrainState, forgive, without_frozen
from jaxblt.training.stored.cadence import SaveCadence
from jaxblt.training.stored.checkpoint import Checkpointer


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


@dataclass(frozen=True)
class Trainer:
    """The loop itself, with everything it talks to, and shapes compiled for.

    Metrics stay on the devices between log lines. Two steps at most are in flight. Messages call the folder `called`.
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
    called: str
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
                if last:
                    state = self.settle(state)
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
                f"finished at step {step}; next: jaxblt evaluate {shlex.quote(self.called)}"
            )
        else:
            told = "fit again to go on, or repeat the jaxblt command"
            if self.out_of_time:  # the same command would train one step and stop again
                told = (
                    f"train.time_limit_s = {train.time_limit_s:g} counts all {self.journal.meter.seconds:.0f} s of the "
                    "run: raise it to go on"
                )
            self.journal.progress.say(f"stopped and saved at step {step} of {train.steps}; {told}")
        timed_out = not finished and self.out_of_time
        return Fitted(self.setup.recipe, state, step, finished, validated, timed_out)

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

    def settle(self, state: TrainState) -> TrainState:
        """Return the state after the last step, with learned patches of the mean length that the recipe asks for."""
        moved = partial(
            with_target_length, self.setup.recipe, frozen=state.frozen, data=self.data, mesh=self.setup.mesh
        )
        ema = state.ema
        try:
            return replace(state, params=moved(state.params), ema=None if ema is None else moved(ema))
        except ValueError as error:
            # Save what was trained: a router that scores all bytes alike has no theta to find
            self.journal.progress.say(f"patches keep the length that they have: {error}")
            return state

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


def train(
    begun: Begun,
    checkpoints: Checkpointer,
    journal: Journal,
    stop: StopRequest,
    *,
    called: str,
    source: DocumentSource | None,
) -> Fitted:
    """Take the steps that a run has left, as `Trainer` does; `source` holds the documents of evaluations."""
    validation = Validation(begun.setup, source)
    parts = (begun.setup, begun.data, begun.train_step, validation, begun.standing)
    trainer = Trainer(*parts, checkpoints, journal, stop, begun.startup, called)
    return trainer.run(begun.state, begun.first)


def already_finished(begun: Begun, run_dir: str) -> Fitted:
    """Say that the run is finished; nothing is trained or written."""
    recipe, step, why = begun.setup.recipe, begun.first, ""
    steps = recipe.train.steps
    if step < steps:
        why = ", and its evaluations no longer improved (train.patience)"
    with Progress(steps, start=step, show=jax.process_index() == 0) as progress:
        progress.say(f"{run_dir} is finished: it is at step {step} of {steps}{why}; nothing was changed")
    return Fitted(recipe, begun.state, step, finished=True)
