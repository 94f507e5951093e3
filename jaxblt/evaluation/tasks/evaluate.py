"""Scores of a trained run on its task."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.data.batch import Batch
from jaxblt.data.pipeline import make_dataset
from jaxblt.data.splits import SplitName
from jaxblt.data.task_data import TaskDataConfig, TaskDataset
from jaxblt.evaluation.tasks.scores import TaskScores, predict_ids, score
from jaxblt.run import Run
from jaxblt.training.step import predict


def predictor(run: Run) -> Callable[[Batch], Any]:
    """`batch -> Int[B, T]`, the ids that a run's model finds likeliest; compiled for each shape."""
    task = run.task

    @jax.jit
    def ids(params: Any, frozen: Any, batch: Batch) -> Any:
        return predict_ids(predict(task, params, frozen, batch, {})[0])

    return lambda batch: ids(run.params, run.frozen, jax.tree.map(jnp.asarray, batch))


def score_run(run: Run, split: SplitName = "test", *, max_batches: int | None = None) -> TaskScores:
    """Scores a run on a split of its task, on one device.

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
    return score(predictor(run), data, max_batches=max_batches)
