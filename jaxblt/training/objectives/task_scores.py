"""Scores of several tasks at once: a weighted sum of their losses, and the figures of each under its name."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxblt.data.batch import Batch
from jaxblt.models.task_heads import TaskAnswers
from jaxblt.training.objectives.label_scores import LabelScores, NumberScores, Sums, filled
from jaxblt.training.objectives.scores import Scores

Weighting = Literal["fixed", "uncertainty", "gradnorm", "dwa"]


@runtime_checkable
class Weighted(Protocol):
    """A task with the weight of its loss."""

    @property
    def name(self) -> str: ...

    @property
    def objective(self) -> LabelScores | NumberScores: ...

    @property
    def weight(self) -> float: ...


class TaskScores(Scores):
    """Scores of tasks i, each with an objective of its own for the labels of its name.

    L_i is the mean loss over the rows that have a label of task i. It is the cross-entropy in nats, or the square error
    in units of the scale. "fixed" weights give loss = Σ w_i L_i. "uncertainty" learns s_i = log σ_i² with the
    parameters (Kendall, Gal and Cipolla, 1705.07115, sec. 3.2): loss = Σ (a_i exp(-s_i) L_i + s_i / 2), with a_i = 1
    for classes and 1/2 for numbers. A task without a label in the batch adds nothing, its s_i / 2 included.

    "gradnorm" and "dwa" give loss = Σ w_i L_i with weights that `jaxblt.training.objectives.balance` moves.

    To its task a row without a label is a row that holds nothing. Figures are those of the tasks' own objectives, as
    "task/figure". There is also "task/weight" where weights are not fixed, a_i exp(-s_i) or w_i.
    """

    tasks: tuple[Any, ...]
    weighting: Weighting
    headline = "loss"
    higher_is_better = False

    @property
    def headlines(self) -> tuple[str, ...]:
        """The figure to show first of each task."""
        return tuple(f"{task.name}/{task.objective.headline}" for task in self.tasks)

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Figures that evaluations may be compared by."""
        each = (f"{task.name}/{name}" for task in self.tasks for name in task.objective.figure_names)
        return ("loss", *each)

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Count rows that have a label of some task."""
        held = jnp.stack([has_label(batch, task.name) for task in self.tasks])
        return jnp.sum(jnp.any(held, 0).astype(jnp.float32))

    def weigh(self, batch: Batch) -> Batch:
        """Give the batch `label_weights`: w_i n / n_i for a row with a label of task i, 0 for others.

        n_i counts those rows, n the rows with any label. So Σ weight · loss / n is the weighted sum of means, and the
        sums of micro-batches add up to that of the whole batch.
        """
        rows, weights = self.weight(batch), {}
        for task in self.tasks:
            held = has_label(batch, task.name).astype(jnp.float32)
            weights[task.name] = held * (jnp.float32(task.weight) * rows / jnp.maximum(jnp.sum(held), 1))
        return batch.replace(label_weights=weights)  # pyright: ignore[reportAttributeAccessIssue]

    def sums(self, logits: TaskAnswers, batch: Batch) -> Sums:
        """Return each task's sums with "task/" in front, "loss" over rows with the batch's weights, rows as "weight".

        With uncertainty "task/log_variance" is s_i times the rows, with a balance "task/balance" w_i times the rows.
        """
        assert batch.label_weights is not None
        rows, total = self.weight(batch), jnp.float32(0)
        found = {}
        for task in self.tasks:
            one, output = alone(batch, task.name), logits.outputs[task.name]
            own, losses = task.objective.sums(output, one), task.objective.losses(output, one)
            if self.weighting == "uncertainty":
                assert logits.log_variances is not None
                s = logits.log_variances[task.name]
                losses = jnp.float32(share(task)) * jnp.exp(-s) * losses + s / 2
                own["log_variance"] = s * rows
            if logits.weights is not None:
                w = logits.weights[task.name]
                losses, own["balance"] = w * losses, jax.lax.stop_gradient(w) * rows
            total = total + jnp.sum(losses * batch.label_weights[task.name])
            found |= {f"{task.name}/{name}": value for name, value in own.items()}
        return {"loss": total, "weight": rows, **found}

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss, and the figures of each task that has labels; in a traced step NaN for one without."""
        xp: Any = np if isinstance(sums["weight"], np.floating | np.ndarray) else jnp
        loss, found = xp.zeros((), xp.float32), {}
        for task in self.tasks:
            own = {name.partition("/")[2]: sums[name] for name in sums if name.startswith(f"{task.name}/")}
            if xp is np and own["weight"] == 0:
                continue
            figures = task.objective.figures(own)
            term = figures["loss"] * task.weight
            if self.weighting == "uncertainty":
                s = own["log_variance"] / sums["weight"]
                figures["weight"] = share(task) * xp.exp(-s)
                term = figures["weight"] * figures["loss"] + s / 2
            if "balance" in own:
                figures["weight"] = own["balance"] / sums["weight"]
                term = figures["weight"] * figures["loss"]
            loss = loss + xp.where(own["weight"] > 0, term, 0)
            found |= {f"{task.name}/{name}": value for name, value in figures.items()}
        return {"loss": loss, **found}

    def rows(self, logits: TaskAnswers, batch: Batch) -> dict[str, Array]:
        """Gather what each task's objective does, with "task/" in front."""
        found = {}
        for task in self.tasks:
            own = task.objective.rows(logits.outputs[task.name], alone(batch, task.name))
            found |= {f"{task.name}/{name}": value for name, value in own.items()}
        return found

    def ranked(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return figures of each task that need all rows of a split."""
        found = {}
        for task in self.tasks:
            own = {name.partition("/")[2]: rows[name] for name in rows if name.startswith(f"{task.name}/")}
            found |= {f"{task.name}/{name}": v for name, v in task.objective.ranked(own).items()}
        return found


def share(task: Weighted) -> float:
    """Return a_i of `TaskScores`."""
    return 0.5 if isinstance(task.objective, NumberScores) else 1.0


def has_label(batch: Batch, name: str) -> Bool[Array, "B"]:
    """Mark rows that hold something and have a label of a task.

    Raises:
      ValueError: the batch has no labels of the name.
    """
    if not isinstance(batch.labels, dict) or name not in batch.labels:
        known = sorted(batch.labels) if isinstance(batch.labels, dict) else "none by name"
        raise ValueError(f"task {name!r} needs its labels in batch.labels, got {known}: set data.tasks")
    labels = batch.labels[name]
    known = ~jnp.isnan(labels) if jnp.issubdtype(labels.dtype, jnp.floating) else labels >= 0
    return known & (filled(batch) > 0)


def alone(batch: Batch, name: str) -> Batch:
    """Return the batch of one task: rows without a label of it hold nothing."""
    held = has_label(batch, name)
    assert isinstance(batch.labels, dict)
    labels = jnp.where(held, batch.labels[name], 0)
    segments = jnp.where(held[:, None], batch.segment_ids, 0)
    return batch.replace(  # pyright: ignore[reportAttributeAccessIssue]
        labels=labels.astype(batch.labels[name].dtype), segment_ids=segments, label_weights=None
    )
