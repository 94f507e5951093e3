"""The quality of answers: accuracy over answers, exact match of whole rows, and both by subtask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.data.batch import Batch
from jaxblt.data.schedule import spread
from jaxblt.data.task_data import TaskDataset
from jaxblt.validation import whole

SOLVED = 0.95
"""Exact match above which a subtask counts as solved (Weston et al. 2015, 1502.05698, sec. 5)."""


def predict_ids(logits: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """Return the likeliest id at each position."""
    return jnp.argmax(logits, -1).astype(jnp.int32)


def count_answers(predictions: Int[Array, "B T"], batch: Batch) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Count right answers and answers asked for in each row: positions with `loss_mask` not 0."""
    asked = batch.loss_mask > 0
    right = asked & (predictions == batch.targets)
    return jnp.sum(right, 1, dtype=jnp.int32), jnp.sum(asked, 1, dtype=jnp.int32)


@dataclass(frozen=True)
class TaskScores:
    """Scores of a split, by subtask; a task without subtasks is one of its own.

    Attributes:
      names: of the subtasks.
      rows: examples of each.
      accuracy: right answers / answers of each.
      exact: examples of each with no wrong answer / examples.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    accuracy: tuple[float, ...]
    exact: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Exact match, every subtask counted alike."""
        return sum(self.exact) / len(self.exact)

    @property
    def worst(self) -> float:
        """Exact match of the worst subtask."""
        return min(self.exact)

    @property
    def solved(self) -> int:
        """Subtasks with an exact match above 95 %."""
        return sum(exact > SOLVED for exact in self.exact)

    def figures(self) -> dict[str, float]:
        """Return figures by name, for a log or a table.

        Those of subtasks stand there only if there are several.
        """
        found = {"accuracy": sum(self.accuracy) / len(self.accuracy), "exact_match": self.mean}
        if len(self.names) == 1:
            return found
        each = {f"exact_match_{name}": exact for name, exact in zip(self.names, self.exact, strict=True)}
        return {**found, "worst": self.worst, "solved": self.solved, **each}


def summarise(right: np.ndarray, asked: np.ndarray, groups: np.ndarray, names: tuple[str, ...]) -> TaskScores:
    """Make scores from counts of rows.

    Args:
      right, asked: Int[N], of each row, as of `count_answers`.
      groups: Int[N], its subtask; rows of -1 are empty and do not count.
      names: of the subtasks; one name stands for all rows where there are none.

    Raises:
      ValueError: a subtask has no row, or one that asks for nothing.
    """
    counts, accuracy, exact = [], [], []
    for group, name in enumerate(names):
        chosen = groups == group
        if not asked[chosen].all() or not chosen.any():
            raise ValueError(
                f"subtask {name!r} has no row, or a row without an answer: score a whole split of a task"
            )
        counts.append(int(chosen.sum()))
        accuracy.append(float(right[chosen].sum() / asked[chosen].sum()))
        exact.append(float((right[chosen] == asked[chosen]).mean()))
    return TaskScores(names, tuple(counts), tuple(accuracy), tuple(exact))


def score(
    predict: Callable[[Batch], Any], data: TaskDataset, *, max_batches: int | None = None
) -> TaskScores:
    """Score predictions on a split.

    Args:
      predict: `batch -> Int[B, T]`, the id predicted at each position.
      data: in mode "eval".
      max_batches: score so many, evenly spread over the split; None for all.

    Raises:
      ValueError: the batches hold no row of a subtask, the split has no end, or predictions are no ids.
    """
    if data.num_batches is None:
        raise ValueError("a split without an end cannot be scored: open it with mode='eval'")
    if max_batches is not None:
        whole("max_batches", max_batches, least=1)
    counted = []
    for step in spread(data.num_batches, max_batches):
        batch = data.batch(step)
        found = jnp.asarray(predict(batch))
        if found.shape != batch.targets.shape or not jnp.issubdtype(found.dtype, jnp.integer):
            raise ValueError(
                f"predict must return an id for each position, integers {batch.targets.shape}, got {found.dtype} "
                f"{found.shape}: `predict_ids` makes them of logits"
            )
        counts = count_answers(found, jax.tree.map(jnp.asarray, batch))
        counted.append((*map(np.asarray, counts), data.groups(step)))
    right, asked, groups = (np.concatenate(columns) for columns in zip(*counted, strict=True))
    return summarise(right, asked, groups, data.examples.group_names or ("all",))
