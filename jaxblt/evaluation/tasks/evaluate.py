"""Scores of a trained run on its task."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxblt.data.batch import Batch
from jaxblt.data.pipeline import make_dataset
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import TaskDataConfig, TaskDataset
from jaxblt.evaluation.tasks.scores import TaskScores, predict_ids, score
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.run import Run
from jaxblt.training.start.placement import find_mesh, place_params, placement_of
from jaxblt.training.state import gathered
from jaxblt.training.step import predict


def predictor(run: Run, *, mesh: MeshConfig | Mesh | None = None) -> Callable[[Batch], Any]:
    """Return `batch -> Int[B, T]`, the ids that a run's model finds likeliest.

    It compiles for each shape.

    Args:
      run: trained on a task.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.
    """
    task, place = run.task, placement_of(run.recipe, find_mesh(mesh))
    params, frozen = run.params, run.frozen
    if place.mesh is not None:
        params, frozen = place_params(run.recipe, params, frozen, place.mesh)

    @jax.jit
    def ids(params: Any, frozen: Any, batch: Batch) -> Any:
        return predict_ids(predict(task, params, frozen, batch, {})[0])

    def on_host(batch: Batch) -> Any:
        with place.in_force:
            return place.in_order(gathered(ids(params, frozen, place.batch(batch))))

    return on_host


def score_run(
    run: Run,
    split: SplitName = "test",
    *,
    max_batches: int | None = None,
    mesh: MeshConfig | Mesh | None = None,
) -> TaskScores:
    """Score a run on a split of its task.

    Args:
      run: trained on it.
      split: of its data.
      max_batches: score so many, evenly spread over the split; None for all.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: the run was not trained on a task, or on labels; or the split has no end.
    """
    config = run.recipe.data
    if not isinstance(config, TaskDataConfig):
        raise ValueError(f"run {run.recipe.name!r} learned no task: its data is a {type(config).__name__}")
    if config.labels is not None:
        raise ValueError(f"run {run.recipe.name!r} was trained on labels: run.evaluate({split!r}) scores it")
    data = make_dataset(config, split=split, mode="eval")
    assert isinstance(data, TaskDataset)
    return score(predictor(run, mesh=mesh), data, max_batches=max_batches)
