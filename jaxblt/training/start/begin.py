"""Where a run begins or goes on: its first state, and what its folder holds before the first step."""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from jaxblt.adapters import join_params
from jaxblt.data.dataset import Dataset
from jaxblt.data.sources import DocumentSource
from jaxblt.precision.scaling import check_scales
from jaxblt.show import show
from jaxblt.training.best import Standing, standing_of
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.boundaries import with_boundaries
from jaxblt.training.start.experts import with_experts
from jaxblt.training.start.frozen import inherited_entropy, load_frozen, resolve
from jaxblt.training.start.initial_params import take
from jaxblt.training.start.reference_run import load_reference
from jaxblt.training.start.setup import (
    Setup,
    entropy_history,
    init_scaling,
    init_state,
    make_setup,
    open_data,
)
from jaxblt.training.start.startup import Startup
from jaxblt.training.start.step_ahead import StepAhead
from jaxblt.training.start.word_regression import with_words
from jaxblt.training.state import OPTIONAL, Frozen, TrainState, copied, forgive, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer, Restored
from jaxblt.training.stored.frozen_store import write_frozen
from jaxblt.training.stored.links import sign_links
from jaxblt.training.stored.resolved import (
    Resolved,
    adopt,
    continued,
    inherit,
    keep_earlier,
    learned_changes,
    list_changes,
    write_resolved,
)


@dataclass(frozen=True)
class Begun:
    """A run that has its first state.

    Attributes:
      setup: the static side of the run.
      data: rows to train on.
      train_step: the step, which may still compile.
      state: the state after `first` steps.
      first: steps taken by earlier processes.
      meta: what earlier processes noted beside the state.
      standing: how its evaluations compare so far.
      startup: where the time before the first step goes.
    """

    setup: Setup
    data: Dataset
    train_step: StepAhead
    state: TrainState
    first: int
    meta: dict[str, Any]
    standing: Standing
    startup: Startup

    __repr__ = show

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""
        return self.first >= self.setup.recipe.train.steps or self.standing.exhausted


def begin_run(
    recipe: Recipe,
    run_dir: str | os.PathLike[str],
    mesh: Mesh,
    checkpoints: Checkpointer,
    pool: Executor,
    startup: Startup,
    *,
    source: DocumentSource | None,
    resume_with: bool,
    called: str | None = None,
) -> Begun:
    """Open the data and `begin`; the step of a new run compiles meanwhile.

    Args:
      recipe: what to train.
      run_dir: folder of the run; nothing is written there.
      mesh: of all devices.
      checkpoints: of the folder; told which steps are the best.
      pool: its threads compile.
      startup: is told of stages.
      source: documents to use instead of those that the recipe names.
      resume_with: see `fit`.
      called: what messages call the folder; by default its path.
    """
    data = open_data(recipe, mesh, source=source)
    startup.done("data")
    train_step = StepAhead(data, pool, startup)
    options = {"resume_with": resume_with, "called": called, "prepare": train_step.prepare}
    setup, state, first, meta = begin(recipe, run_dir, data, mesh, checkpoints, **options)
    standing = standing_of(setup.recipe, meta)
    checkpoints.best = lambda: standing.steps if setup.recipe.train.keep_best else ()
    data = replace(data, history=entropy_history(setup.recipe))
    return Begun(setup, data, train_step, state, first, meta, standing, startup)


def begin(
    recipe: Recipe,
    run_dir: str | os.PathLike[str],
    data: Dataset,
    mesh: Mesh,
    checkpoints: Checkpointer,
    *,
    resume_with: bool = False,
    called: str | None = None,
    prepare: Callable[[Setup, int], None] | None = None,
) -> tuple[Setup, TrainState, int, dict[str, Any]]:
    """Return setup, first state, its step, and what was noted beside it: seconds of training, the best evaluations.

    `prepare` is called with the setup and step 0 before parameters are drawn, and not for a run that goes on.

    1. The folder holds a checkpoint: the run goes on from the newest one that can be read, if the recipe learns what
       the run does (`adopt`). Log lines of later steps are dropped, for they come again.
    2. `recipe.init_from` names a run: its newest parameters, with a fresh optimiser, at step 0; and its entropy model,
       threshold and capacity, if both cut patches by the same rule. Parameters of `recipe.fresh` are drawn.
       `recipe.base_run` names one: its parameters stay frozen, and threshold and capacity are its own too. Experts of
       banks start as the LoRAs that `recipe.experts` names.
    3. Otherwise: parameters drawn from the seed, at step 0.

    Where a head reads words, they are those of a regression (`with_words`). A router that no run has trained is
    calibrated (`with_boundaries`).
    """
    # as process 0 sees them: processes that disagree would wait for each other for ever
    if checkpoints.steps():
        stored = continued(run_dir)
        recipe = adopt(recipe, stored, resume_with=resume_with, run_dir=called or run_dir)
        frozen = load_frozen(run_dir, stored, mesh)
        setup = make_setup(recipe, mesh, frozen)
        state, meta, step = _restore_state(checkpoints, setup, frozen)
        _check_steps_left(recipe, stored, step)
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
    if prepare is not None:
        prepare(setup, 0)
    state = init_state(setup, frozen)
    params = join_params(state.params, taken.params)
    params = with_words(recipe, with_experts(recipe, params, frozen, mesh))
    params = with_boundaries(recipe, params, taken.params, frozen, data, mesh)
    state = replace(state, params=params, ema=None if state.ema is None else copied(params))
    return setup, state, 0, {"seconds": 0.0}


def _restore_state(checkpoints: Checkpointer, setup: Setup, frozen: dict[str, Frozen]) -> Restored:
    """Restore the state of the newest whole step, with the frozen trees that no step holds; errors as of `restore`.

    Steps of runs from before frozen trees had folders hold them too; what they hold is not read. An average that the
    run did not have so far begins at the parameters, and scales begin as in a new run. What a run no longer has of
    these is not read.
    """
    wanted = without_frozen(setup.abstract)

    def held(stored: Any) -> dict[str, Any]:
        return {name: part for name, part in wanted.items() if name not in OPTIONAL or name in stored}

    leave_out = ("frozen", *(name for name in OPTIONAL if name not in wanted))
    restored = checkpoints.restore(held, leave_out=leave_out)
    state = TrainState(**restored.state, frozen=frozen)
    if "ema" in wanted and state.ema is None:
        state = replace(state, ema=copied(state.params))
    if "scaling" in wanted and state.scaling is None:
        state = replace(state, scaling=init_scaling(setup))
    check_scales(state.scaling)
    return restored._replace(state=state)


def _check_steps_left(recipe: Recipe, stored: Resolved, step: int) -> None:
    """Raise ValueError if settings were changed for a run that has no steps left to learn by them."""
    changed = learned_changes(stored.recipe, recipe)
    if changed and step >= recipe.train.steps:
        raise ValueError(
            f"the run is at step {step} already: raise train.steps = {recipe.train.steps}, or nothing is trained "
            f"with these changes:{list_changes(changed)}"
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


def write_folder(run_dir: str | os.PathLike[str], begun: Begun, *, is_main: bool) -> None:
    """Write frozen trees and recipe into the folder of a run that goes on, and sign its links."""
    if is_main:
        sign_links(run_dir)
    write_frozen(run_dir, begun.state.frozen)
    if is_main:
        _write_recipe(run_dir, begun)


def _write_recipe(run_dir: str | os.PathLike[str], begun: Begun) -> None:
    """Write the recipe with the hashes of its frozen trees; the one that held before is kept aside."""
    hashes = {name: tree.content_hash for name, tree in begun.state.frozen.items()}
    resolved = Resolved(begun.setup.recipe, hashes)
    keep_earlier(run_dir, resolved, begun.first)
    write_resolved(run_dir, resolved)
