"""Objectives: what a batch asks the model to predict, and how its answers are scored.

Data pipelines yield next-byte batches. The pretraining objectives turn one into a batch for a bidirectional model: some
bytes are hidden behind `MASK` and the targets are the bytes themselves. Only bytes of documents are ever hidden,
never padding or special ids. `jaxblt.training.objectives.scores` and
`label_scores` have the losses and metrics.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxblt.data.batch import Batch
from jaxblt.data.label_tasks import check_task_names
from jaxblt.data.vocab import BOE, OFFSET, VOCAB_SIZE
from jaxblt.models.label_head import check_crf
from jaxblt.training.objectives.answers import check_answers, check_classes
from jaxblt.training.objectives.label_scores import ChainScores, LabelScores, NumberScores, PositionScores
from jaxblt.training.objectives.protocol import OwnObjective
from jaxblt.training.objectives.scores import IdScores
from jaxblt.training.objectives.task_scores import TaskScores, Weighting
from jaxblt.validation import check_bounds, check_fields

MASK = BOE
"""The id that stands for a hidden byte: BOE, which no pipeline puts into a document."""
MOST_SPAN = 65_536
"""The rate of span starts is found by sums over so many lengths at the most."""


@dataclass(frozen=True)
class NextByte(IdScores):
    """Predict each byte from those before it: the batch as it is.

    Attributes:
      label_smoothing: share of a target's probability that is spread over all ids (1512.00567, sec. 7).
      accuracy: count right ids and right rows as well, for tasks whose answers are scored by `loss_mask`.
    """

    label_smoothing: float = 0.0
    accuracy: bool = False
    causal = True
    any_order = True  # a target lies beside its byte, wherever a layout puts both

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "label_smoothing", least=0, below=1, why=": it is a share")

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return batch


@dataclass(frozen=True)
class Masked(IdScores):
    """Predict a random share of the bytes (BERT, 1810.04805, sec. 3.1).

    Of the chosen bytes `hidden` become MASK, `swapped` another byte drawn at random, and the rest stay.
    """

    rate: float = 0.15
    hidden: float = 0.8
    swapped: float = 0.1
    causal = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "rate", above=0, below=1, why=": it is the share of bytes to predict")
        check_bounds(self, "hidden", "swapped", least=0, most=1)
        if not 0 < self.hidden + self.swapped <= 1:
            raise ValueError(
                f"hidden + swapped must be above 0 and at most 1, got {self.hidden} + {self.swapped}: bytes that are "
                "shown are no task"
            )

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        choose, treat, draw = jax.random.split(key, 3)
        chosen = (jax.random.uniform(choose, batch.inputs.shape) < self.rate) & maskable(batch)
        u = jax.random.uniform(treat, batch.inputs.shape)
        other = jax.random.randint(draw, batch.inputs.shape, OFFSET, VOCAB_SIZE, jnp.int32)
        shown = jnp.where(u < self.hidden + self.swapped, other, batch.inputs)
        shown = jnp.where(u < self.hidden, MASK, shown)
        return _ask(batch, jnp.where(chosen, shown, batch.inputs), chosen.astype(jnp.float32))


@dataclass(frozen=True)
class Span(IdScores):
    """Predict runs of hidden bytes (SpanBERT, 1907.10529, sec. 3.1), lengths uniform in 1..max_length.

    Spans may touch or overlap; they end where their document does. `rate` is the share of bytes hidden away from
    document starts, where fewer spans can reach.
    """

    rate: float = 0.2
    max_length: int = 10
    causal = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "rate", above=0, below=1, why=": it is the share of bytes to predict")
        check_bounds(self, "max_length", least=1, most=MOST_SPAN)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        begin, measure = jax.random.split(key)
        shape = batch.inputs.shape
        starts = jax.random.uniform(begin, shape) < span_start_rate(self.rate, self.max_length)
        lengths = jax.random.randint(measure, shape, 1, self.max_length + 1, jnp.int32)
        index = jnp.arange(shape[1], dtype=jnp.int32)[None]
        ends = jnp.minimum(index + lengths, document_ends(batch.segment_ids))
        reach = jax.lax.cummax(jnp.where(starts, ends, 0), axis=1)
        chosen = (index < reach) & maskable(batch)
        return _ask(batch, jnp.where(chosen, MASK, batch.inputs), chosen.astype(jnp.float32))


@dataclass(frozen=True)
class OrderAgnostic(IdScores):
    """Predict the bytes in any order: order-agnostic autoregressive diffusion (2110.02037, eq. 5 and algorithm 1).

    Of a row's D bytes n are hidden, with n drawn uniformly from 1..D and each set of n as likely as another. Each
    hidden byte weighs D/n. The loss is then an unbiased estimate of a bound on the negative log-likelihood per byte.
    """

    causal = False

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        count, order = jax.random.split(key)
        allowed = maskable(batch)
        total = jnp.sum(allowed, 1, dtype=jnp.int32)
        hidden = jax.random.randint(count, total.shape, 1, jnp.maximum(total, 1) + 1, jnp.int32)
        priority = jnp.where(allowed, jax.random.uniform(order, allowed.shape), 2.0)
        rank = jnp.argsort(jnp.argsort(priority, axis=1), axis=1)
        chosen = (rank < hidden[:, None]) & allowed
        weight = (total.astype(jnp.float32) / hidden.astype(jnp.float32))[:, None]
        return _ask(batch, jnp.where(chosen, MASK, batch.inputs), jnp.where(chosen, weight, 0.0))


@dataclass(frozen=True)
class Classify(LabelScores):
    """Predict `batch.labels`, a class for each row, with a model whose logits are [rows, classes].

    Attributes:
      causal: whether the model reads from left to right, as its config says.
      label_smoothing: share of a label's probability that is spread over all classes (1512.00567, sec. 7).
    """

    causal: bool = True
    label_smoothing: float = 0.0
    target = "class"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "label_smoothing", least=0, below=1, why=": it is a share")

    def check(self, recipe: Any) -> None:
        """Check that the model answers with classes, as many as labels may be of."""
        check_answers(recipe, "ByteClassifierConfig or LabellerConfig")
        check_classes(recipe)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return _labelled(self, batch)


@dataclass(frozen=True)
class ClassifyPositions(PositionScores):
    """Predict `batch.labels`, a class for each position that has one, with a model whose logits are [B, T, classes]."""

    causal: bool = True
    target = "positions"

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, recipe: Any) -> None:
        """Check that the model answers with labels."""
        check_answers(recipe)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return _labelled(self, batch)


@dataclass(frozen=True)
class ClassifyChain(ChainScores):
    """Predict `batch.labels` as `ClassifyPositions` does, with a model whose answers are the potentials of a CRF."""

    causal: bool = True
    target = "positions"
    crf = True

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, recipe: Any) -> None:
        """Check that the model's head is a CRF."""
        check_crf(recipe)
        check_answers(recipe)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return _labelled(self, batch)


@dataclass(frozen=True)
class Regress(NumberScores):
    """Predict `batch.labels`, a number for each row, with a model that answers with one: least squares.

    Attributes:
      center, scale: the model predicts (label - center) / scale: mean and standard deviation of the training labels.
    """

    causal: bool = True
    center: float = 0.0
    scale: float = 1.0
    target = "number"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "scale", above=0, why=": labels are divided by it")

    def check(self, recipe: Any) -> None:
        """Check that the model answers with labels."""
        check_answers(recipe)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return _labelled(self, batch)


@dataclass(frozen=True)
class TaskLoss:
    """One of several tasks.

    Attributes:
      name: of the task, its head and its labels.
      objective: what is asked of a row.
      weight: of its mean loss in the sum.
    """

    name: str
    objective: Classify | Regress
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "weight", least=0, why=": it is the weight of a loss")


@dataclass(frozen=True)
class MultiTask(TaskScores):
    """Predict several labels of each row, `batch.labels[name]`, with a model that has a head for each.

    Attributes:
      tasks: with their weights.
      weighting: "fixed" takes the weights; "uncertainty" learns them; "gradnorm" and "dwa" move them by how gradients
        or losses go, see `TaskScores`.
    """

    tasks: tuple[TaskLoss, ...]
    weighting: Weighting = "fixed"
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        names, weights = [t.name for t in self.tasks], {t.name: t.weight for t in self.tasks}
        if not names or len(weights) != len(names):
            raise ValueError(
                f"MultiTask.tasks must be at least one, with different names, got {tuple(names)}"
            )
        if not any(weights.values()):
            raise ValueError(f"every task of MultiTask.tasks has weight 0, got {weights}: raise one")
        if self.weighting != "fixed" and any(weight != 1 for weight in weights.values()):
            raise ValueError(
                f"weighting {self.weighting!r} learns the weights of tasks, and they are given as {weights}: leave the "
                "weights out, or set weighting to 'fixed'"
            )
        if other := [t.name for t in self.tasks if t.objective.causal != self.causal]:
            raise ValueError(f"MultiTask.causal is {self.causal}, and task {other[0]!r} says otherwise")

    def check(self, recipe: Any) -> None:
        """Check that each task has labels and a head, and that what the objective learns of tasks the heads learn."""
        check_task_names(recipe)
        head = getattr(recipe.model, "head", None)
        learned, balance = getattr(head, "uncertainty", False), getattr(head, "balance", None)
        if learned != (self.weighting == "uncertainty"):
            raise ValueError(
                f"objective.weighting is {self.weighting!r} and model.head.uncertainty is {learned}: only "
                "'uncertainty' and True go together"
            )
        if balance != (self.weighting if self.weighting in ("gradnorm", "dwa") else None):
            raise ValueError(
                f"objective.weighting is {self.weighting!r} and model.head.balance is {balance!r}: set both to "
                "'gradnorm' or 'dwa', or balance to None"
            )
        check_answers(recipe)

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        return self.weigh(_labelled(self, batch))


def _labelled(objective: Any, batch: Batch) -> Batch:
    if batch.labels is None:
        raise ValueError(f"objective {type(objective).__name__} needs batch.labels: use data with labels")
    return batch


Objective = (
    NextByte
    | Masked
    | Span
    | OrderAgnostic
    | Classify
    | ClassifyPositions
    | ClassifyChain
    | Regress
    | MultiTask
    | OwnObjective
)
"""What a model is trained for: the objectives that a command line can name, and those of one's own."""


def maskable(batch: Batch) -> Bool[Array, "B T"]:
    """Mark the bytes of documents: not padding, holes or special ids."""
    return (batch.segment_ids > 0) & (batch.inputs >= OFFSET)


def span_start_rate(rate: float, max_length: int) -> float:
    """Return the probability p with which a span starts at each byte, so that spans cover `rate` of the bytes.

    Lengths are uniform in 1..M. A byte is bare if none of the M starts before it reaches it:
    1 - rate = Π_{j<M} (1 - p (M-j)/M).
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        bare = 1.0
        for j in range(max_length):
            bare *= 1 - middle * (max_length - j) / max_length
        low, high = (middle, high) if 1 - bare < rate else (low, middle)
    return low


def document_ends(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return the index just behind the last position of the document that each position belongs to."""
    length = segment_ids.shape[1]
    index = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    last = jnp.concatenate(
        [segment_ids[:, 1:] != segment_ids[:, :-1], jnp.ones_like(segment_ids[:, :1], bool)], 1
    )
    return jax.lax.cummin(jnp.where(last, index, length), axis=1, reverse=True)


def _ask(batch: Batch, inputs: Int[Array, "B T"], weights: Float[Array, "B T"]) -> Batch:
    """Show `inputs` and ask for the true bytes. Entropies were of the true bytes: they are dropped."""
    return replace(batch, inputs=inputs, targets=batch.inputs, loss_mask=weights, entropies=None)
