"""The train loop: reads top to bottom, from devices to the last checkpoint."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxblt.adapters import join_params
from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.data.labelled import classes_of
from jaxblt.data.sources import DocumentSource
from jaxblt.show import show
from jaxblt.training.best import Standing, followed
from jaxblt.training.cadence import SaveCadence
from jaxblt.training.evaluate import Validation
from jaxblt.training.flops import peak_flops
from jaxblt.training.health import BadSteps, check_health, spans
from jaxblt.training.log.continuations import NAME as SAMPLE
from jaxblt.training.log.continuations import Continuation, continuation_of
from jaxblt.training.log.hosted_trackers import check_trackers, open_trackers
from jaxblt.training.log.meter import Cost, Meter, traced
from jaxblt.training.log.pictures import first_passage, log_confusion, log_passage
from jaxblt.training.log.report import costs_by_length, describe, op_choices
from jaxblt.training.log.runlog import Progress, RunLog
from jaxblt.training.log.trackers import Tracker, hyperparameters_of
from jaxblt.training.metrics import Metrics, as_scalars
from jaxblt.training.objectives.label_scores import CONFUSION
from jaxblt.training.preemption import StopRequest, Vote
from jaxblt.training.recipe import Recipe
from jaxblt.training.routing.experts import with_experts
from jaxblt.training.start.frozen import inherited_entropy, load_frozen, resolve
from jaxblt.training.start.initial_params import take
from jaxblt.training.start.reference_run import load_reference
from jaxblt.training.start.setup import (
    Setup,
    entropy_history,
    init_state,
    make_setup,
    open_data,
    recipe_step,
    to_devices,
)
from jaxblt.training.start.startup import Startup, keep_compiled
from jaxblt.training.start.word_regression import with_words
from jaxblt.training.state import Frozen, TrainState, copied, forgive, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer, Restored
from jaxblt.training.stored.folder import claimed
from jaxblt.training.stored.frozen_store import write_frozen
from jaxblt.training.stored.links import sign_links
from jaxblt.training.stored.remote_run import trained_in
from jaxblt.training.stored.resolved import (
    Resolved,
    adopt,
    checkpoint_dir,
    continued,
    inherit,
    keep_earlier,
    learned_changes,
    write_resolved,
)

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
    """Trains a recipe in a folder, from the start or from where an earlier process left off.

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
    """Trains in a local folder, which messages call something else if it is a copy."""
    startup = Startup()
    check_trackers(recipe.train.trackers)
    opened = partial(open_trackers, recipe.train.trackers, trackers)
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
        costs, full = costs_by_length(setup, data), recipe.data.seq_len
        example = to_devices(data.batch(first), mesh, recipe.data.batch_size, setup.layout)
        report = describe(setup, data, op_choices(train_step, state, example), costs[full])
        peak = peak_flops(jax.devices()[0].device_kind)
        meter = Meter(costs[full], None if peak is None else peak * mesh.size, seconds=meta["seconds"])
        validation, continuation = Validation(setup, source), continuation_of(setup.recipe)
        startup.done("tracing")

        # Up to here a start may fail: nothing before this line writes to the folder.
        with (
            RunLog(run_dir, is_main=is_main, trackers=opened) as log,
            log.progress(recipe.train.steps, start=first) as progress,
        ):
            stop = closed_last.enter_context(StopRequest())
            if is_main:
                sign_links(run_dir)
            write_frozen(run_dir, state.frozen)
            if is_main:
                write_recipe(run_dir, setup.recipe, state, first)
            announce(log, progress, setup.recipe, first, report)
            trainer = Trainer(
                *(setup, data, train_step, costs, validation, continuation, standing, checkpoints),
                *(log, progress, meter, stop, startup),
            )
            return trainer.run(state, first)


def announce(log: RunLog, progress: Progress, recipe: Recipe, first: int, report: str) -> None:
    """Begins the log at a step, with the recipe and the report on what is about to run."""
    log.truncate_after(first)
    log.hyperparameters(hyperparameters_of(recipe))
    log.text(first, "report", f"```\n{report}\n```")
    progress.say(f"{report}\n" + (f"\ngoing on from step {first}" if first else ""))


def write_recipe(run_dir: str | os.PathLike[str], recipe: Recipe, state: TrainState, first: int) -> None:
    """Writes the recipe with the hashes of its frozen trees; the one that held before step `first` is kept aside."""
    resolved = Resolved(recipe, {name: tree.content_hash for name, tree in state.frozen.items()})
    keep_earlier(run_dir, resolved, first)
    write_resolved(run_dir, resolved)


def already_finished(setup: Setup, state: TrainState, step: int, run_dir: str) -> Fitted:
    """Says so; nothing is trained or written."""
    steps, why = setup.recipe.train.steps, ""
    if step < steps:
        why = ", and its evaluations no longer improved (train.patience)"
    with Progress(steps, start=step, show=jax.process_index() == 0) as progress:
        progress.say(f"{run_dir} is finished: it is at step {step} of {steps}{why}; nothing was changed")
    return Fitted(setup.recipe, state, step, finished=True)


def standing_of(recipe: Recipe, meta: dict[str, Any]) -> Standing:
    """How the run's evaluations compare so far."""
    train, (figure, higher) = recipe.train, followed(recipe)
    meta = {"best_by": recipe.objective.headline} | meta  # older versions compared nothing else
    return Standing(train.keep_best, train.patience, higher=higher, meta=meta, figure=figure)


def begin(
    recipe: Recipe,
    run_dir: str | os.PathLike[str],
    data: Dataset,
    mesh: Mesh,
    checkpoints: Checkpointer,
    *,
    resume_with: bool = False,
) -> tuple[Setup, TrainState, int, dict[str, Any]]:
    """Setup, first state, its step, and what was noted beside it: seconds of training, the best evaluations.

    1. The folder holds a checkpoint: the run goes on from the newest one that can be read, if the recipe learns what
       the run does (`adopt`). Log lines of later steps are dropped, for they come again.
    2. `recipe.init_from` names a run: its newest parameters, with a fresh optimiser, at step 0; and its entropy model,
       threshold and capacity, if both cut patches by the same rule. Parameters of `recipe.fresh` are drawn.
       `recipe.base_run` names one: its parameters stay frozen, and threshold and capacity are its own too. Experts of
       banks start as the LoRAs that `recipe.experts` names.
    3. Otherwise: parameters drawn from the seed, at step 0.

    Where a head reads words, they are those of a regression (`with_words`).
    """
    # as process 0 sees them: processes that disagree would wait for each other for ever
    if checkpoints.steps():
        stored = continued(run_dir)
        recipe = adopt(recipe, stored, resume_with=resume_with)
        frozen = load_frozen(run_dir, stored, mesh)
        setup = make_setup(recipe, mesh, frozen)
        state, meta, step = restore_state(checkpoints, setup, frozen)
        check_steps_left(recipe, stored, step)
        return setup, forgive(state), step, meta
    for earlier in filter(None, (recipe.init_from, recipe.base_run)):
        recipe = inherit(recipe, earlier)
    recipe, inherited = inherited_entropy(recipe, mesh)
    recipe, frozen = resolve(recipe, data, mesh, inherited)
    recipe, reference = load_reference(recipe, mesh)
    frozen |= reference
    taken = take(recipe, mesh)
    frozen |= taken.frozen
    setup = make_setup(recipe, mesh, frozen, taken.notes)
    state = init_state(setup, frozen)
    params = join_params(state.params, taken.params)
    params = with_words(recipe, with_experts(recipe, params, frozen, mesh))
    state = replace(state, params=params, ema=None if state.ema is None else copied(params))
    return setup, state, 0, {"seconds": 0.0}


def restore_state(checkpoints: Checkpointer, setup: Setup, frozen: dict[str, Frozen]) -> Restored:
    """The state of the newest whole step, with the frozen trees that no step holds; errors as of `restore`.

    Steps of runs from before frozen trees had folders hold them too; what they hold is not read. An average that the
    run did not have so far begins at the parameters; one that it no longer has is not read.
    """
    wanted = without_frozen(setup.abstract)

    def held(stored: Any) -> dict[str, Any]:
        return {name: part for name, part in wanted.items() if name != "ema" or name in stored}

    leave_out = ("frozen",) if "ema" in wanted else ("frozen", "ema")
    restored = checkpoints.restore(held, leave_out=leave_out)
    state = TrainState(**restored.state, frozen=frozen)
    if "ema" in wanted and state.ema is None:
        state = replace(state, ema=copied(state.params))
    return restored._replace(state=state)


def check_steps_left(recipe: Recipe, stored: Resolved, step: int) -> None:
    """Raises ValueError if settings were changed for a run that has no steps left to learn by them."""
    changed = learned_changes(stored.recipe, recipe)
    if changed and step >= recipe.train.steps:
        raise ValueError(
            f"the run is at step {step} already, so that nothing would be trained with {', '.join(changed)}: "
            f"raise train.steps = {recipe.train.steps}"
        )


def check_same_data(meta: dict[str, Any], data: Dataset, run_dir: str) -> None:
    """Raise ValueError if the training split has another size, or other bytes, than when the run was saved.

    Files that were added or changed move the borders of splits, so that bytes held out so far would be trained on.
    """
    before, now = meta.get("data", {}), data.extent
    # Compare what both have: older runs noted no sample, and the oldest nothing
    changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    if not changed:
        return
    told = "blocks that were sampled hold other bytes, at the same size"
    if changed != {"sample"}:
        sizes = [f"{extent['rows']} rows of {extent['bytes']} bytes" for extent in (before, now)]
        told = f"its training split held {sizes[0]}, and holds {sizes[1]}"
    raise ValueError(
        f"the data of {run_dir} have changed: {told}; put the files back, or use another folder (and init_from), or "
        "say with --resume-with (of jaxblt train; resume_with=True of fit) that it is meant"
    )


@dataclass(frozen=True)
class Trainer:
    """The loop itself, with everything it talks to, the cost of a byte by length of row, and shapes compiled for.

    Metrics stay on the devices between log lines. Two steps at most are in flight.
    """

    setup: Setup
    data: Dataset
    train_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    costs: dict[int, Cost]
    validation: Validation
    continuation: Continuation | None
    standing: Standing
    checkpoints: Checkpointer
    log: RunLog
    progress: Progress
    meter: Meter
    stop: StopRequest
    startup: Startup
    compiled: set[tuple[int, ...]] = field(default_factory=set)
    in_flight: deque[Metrics] = field(default_factory=deque)

    __repr__ = show

    def run(self, state: TrainState, first: int) -> Fitted:
        """Steps from `first` to the recipe's last, or until a signal or the time limit; saves before it returns."""
        train, step, stopped, drawn = self.setup.recipe.train, first, False, False
        validated: dict[str, float] = {}
        saves, vote = SaveCadence(train.checkpoint_every, train.checkpoint_every_s), Vote()
        bad = BadSteps(train.max_skips)
        with (
            closing(self.data.iterator(first)) as batches,
            traced(Path(self.log.run_dir) / "profile", train.profile_steps) as trace,
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
                self.meter.pause(paused)
        self.checkpoints.wait()
        finished = step >= train.steps or self.standing.exhausted
        if self.standing.exhausted:
            self.progress.say(
                f"ended at step {step}: {self.standing.since} evaluations in a row were no better"
            )
        if finished:
            self.progress.say(f"finished at step {step}; next: jaxblt evaluate {self.log.run_dir}")
        else:
            told = "fit again to go on, or repeat the jaxblt command"
            if self.out_of_time:  # the same command would train one step and stop again
                told = (
                    f"train.time_limit_s = {train.time_limit_s:g} counts all {self.meter.seconds:.0f} s of the run: "
                    "raise it to go on"
                )
            self.progress.say(f"stopped and saved at step {step} of {train.steps}; {told}")
        return Fitted(self.setup.recipe, state, step, finished, validated)

    @property
    def out_of_time(self) -> bool:
        """Whether the run has trained for as long as it may."""
        limit = self.setup.recipe.train.time_limit_s
        return limit is not None and self.meter.seconds > limit

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
            self.progress.compiling(local.inputs.shape[1])
        with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard(guard):
            state, metrics = self.train_step(state, batch)
        # Keep the queue short: a signal, or the error of a step, waits for all that is in it
        self.in_flight.append(metrics)
        if len(self.in_flight) > 1:
            jax.block_until_ready(self.in_flight.popleft())
        self.meter.cost = self.costs.get(local.inputs.shape[1], self.meter.cost)
        if compiled:
            self.meter.add(int(np.count_nonzero(local.segment_ids)) * self.data.process_count, waited)
        else:
            jax.block_until_ready(metrics)
            self.progress.compiled(step + 1)
            if first:
                self.startup.done("compiling and the first step")
                self.progress.say(self.startup.line())
            self.meter.restart()
        return state, metrics

    def save(self, state: TrainState, step: int, saves: SaveCadence, *, leaving: bool) -> None:
        """Saves, but not amid steps that are not finite: what led to them must not displace older checkpoints.

        Where the run is left the state is saved all the same: it is that of the last good step, further on.
        """
        if leaving or not int(state.skipped_in_a_row):
            noted = self.standing.meta | {"seconds": self.meter.seconds, "data": self.data.extent}
            self.checkpoints.save(step, without_frozen(forgive(state)), noted)
            saves.saved()

    def write(self, metrics: Metrics, step: int, bad: BadSteps) -> None:
        """Fetches a step's metrics, logs them, and raises TrainingFailed where going on would waste the run."""
        fetched = as_scalars(metrics)
        if skipped := bad.fetch():
            self.log.steps(step, "skipped_steps", skipped)
            self.progress.say(f"not finite in loss, gradient or update, and skipped: steps {spans(skipped)}")
        figures = fetched | self.meter.read(fetched)
        self.log.scalars(step, figures)
        shown = (*HEADLINE, *getattr(self.setup.recipe.objective, "headlines", ()))
        self.progress.update(step, {name: figures[name] for name in shown if name in figures})
        check_health(fetched, step, self.setup.recipe)

    def validate(self, state: TrainState, step: int) -> dict[str, float]:
        """Scores the validation split and logs it."""
        found = self.validation(state)
        self.log.scalars(step, {f"validation/{name}": value for name, value in found.items()})
        for name, counts in self.validation.found.totals.items():
            if name.rpartition("/")[2] == CONFUSION:
                classes = classes_of(self.setup.recipe.data, name.rpartition("/")[0])
                log_confusion(self.log, self.progress, step, counts, classes, name)
        figure = self.standing.figure
        if figure not in found:
            raise ValueError(
                f"the validation split gives no {figure}, which runs are compared by: hold out more records, or set "
                "train.best_by to another figure"
            )
        self.standing.note(found[figure], step)
        parts = [f"{source}/{figure}" for source in self.validation.data.source_names]
        parts += getattr(self.setup.recipe.objective, "headlines", ())
        each = [f"{name.partition('/')[0]} {found[name]:.4f}" for name in parts if name in found]
        told = f" ({', '.join(each)})" if each else ""
        if self.continuation is not None:
            self.log.text(step, SAMPLE, self.continuation(state, self.validation.data))
        self.progress.say(f"step {step}: validation {found[figure]:.4f} {figure.replace('_', ' ')}{told}")
        return found

    def draw(self, state: TrainState, step: int) -> None:
        """Logs a picture of the first validation passage's patches.

        What cuts them is frozen, so one a process is enough: a later one would be the same.
        """
        passage = first_passage(self.setup, state.frozen, self.validation.data)
        if passage is not None:
            log_passage(self.log, self.progress, step, passage)
