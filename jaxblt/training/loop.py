"""The start of a training: reads top to bottom, from devices to the loop of steps."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxblt.data.sources import DocumentSource
from jaxblt.training.log.hosted_trackers import check_trackers
from jaxblt.training.log.journal import open_journal
from jaxblt.training.log.trackers import Tracker
from jaxblt.training.preemption import StopRequest
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.begin import begin_run, check_same_data, write_folder
from jaxblt.training.start.startup import Startup, keep_compiled
from jaxblt.training.stored.folder import open_checkpoints
from jaxblt.training.stored.remote_run import trained_in
from jaxblt.training.trainer import Fitted, already_finished, train
from jaxblt.validation import check_kind


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

    Leaves `config.json` (the resolved recipe), `metrics.jsonl`, TensorBoard events and `checkpoints/`. Frozen trees lie
    in `frozen/`. `configs/` has the configs that the run had before it went on with another. A run that is finished is
    left as it is. A start that fails leaves no folder that was not there, and changes none that was.

    SIGTERM, Ctrl-C or a terminal that closes (SIGHUP) saves and ends the run after two steps at most, or three where
    several processes train. A second signal changes nothing, a third ends the process.

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
      TypeError: the recipe, the folder or the source is of another kind.
      ImportError: the package of a tracker that the recipe names is missing.
      TrainingFailed: too many steps in a row were not finite, or too many patch boundaries were refused.
      FolderInUse: another process trains in the folder.
      ValueError: the recipe does not fit the devices, the data or the run that the folder holds.
      FileNotFoundError: the folder holds checkpoints without the config that they belong to.
      OSError: the disk is full.
    """
    check_kind("recipe", recipe, Recipe, fix="make one, such as jaxblt.recipes.get('demo')")
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
        open_checkpoints(run_dir, keep=recipe.train.keep, is_main=is_main) as checkpoints,
        jax.set_mesh(mesh),
    ):
        pool = closed_last.enter_context(ThreadPoolExecutor(1))
        options = {"source": source, "resume_with": resume_with, "called": called}
        begun = begin_run(recipe, run_dir, mesh, checkpoints, pool, startup, **options)
        if begun.is_over:
            return already_finished(begun, called)
        if not resume_with:
            check_same_data(begun.meta, begun.data, called)
        begun.train_step.prepare(begun.setup, begun.first)
        startup.done("parameters")
        # Up to here a start may fail, and while the journal is opened: nothing before this block writes to the folder.
        with open_journal(run_dir, begun, trackers) as journal:
            startup.done("report")
            stop = closed_last.enter_context(StopRequest())
            write_folder(run_dir, begun, is_main=is_main)
            journal.begin(begun.first)
            return train(begun, checkpoints, journal, stop, called=called, source=source)
