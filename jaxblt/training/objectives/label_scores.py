"""Scores of objectives that ask for labels. What adds up is summed on the devices; what must see all rows is gathered.

Counts of classes add up over micro-batches, hosts and splits, as sums of an objective do. Ranks do not: the area under
a curve and Spearman's coefficient need every row's score. So an evaluation gathers `rows` on every host, 4 bytes a
class and row, and `ranked` makes exact figures of them. Training makes none.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.data.batch import Batch
from jaxblt.training.metrics import cross_entropy, smoothed
from jaxblt.training.objectives.crf import log_partition, path_score, viterbi
from jaxblt.training.objectives.scores import Scores


@runtime_checkable
class Ranks(Protocol):
    """An objective with figures that need every row of a split at once."""

    def rows(self, logits: Any, batch: Batch) -> dict[str, Array]:
        """Gather what figures need of each row of a batch."""
        ...

    def ranked(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return figures of all rows of a split."""
        ...


Sums = dict[str, Float[Array, "..."]]
CONFUSION = "confusion"
"""The sum that counts rows by label and prediction, Float[C, C]."""


class LabelScores(Scores):
    """Scores of an objective that asks for a class a row, `batch.labels`.

    loss is the mean over rows of ℓ = (1 - ε) · (-log p[label]) + ε · mean over classes of -log p, in nats. accuracy,
    mcc (Matthews's correlation; Gorodkin 2004) and f1 (the mean over classes) are of the class with the largest logit.
    An evaluation adds auroc and auprc: of two classes those of the second, of more the mean over classes against the
    rest. Classes without a row, or with every row, do not count.
    """

    label_smoothing: float = 0.0
    headline = "accuracy"
    higher_is_better = True
    figure_names = ("loss", "accuracy", "mcc", "f1", "auroc", "auprc")

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Count rows that hold something."""
        return jnp.sum(filled(batch))

    def losses(self, logits: Float[Array, "B C"], batch: Batch) -> Float[Array, "B"]:
        """Return ℓ of each row; NaN for a label that is no class, which recipes refuse."""
        return class_losses(logits, _labels(batch), self.label_smoothing)

    def sums(self, logits: Float[Array, "B C"], batch: Batch) -> Sums:
        """Return Σ ℓ as "loss", rows as "weight", and rows by label and prediction as "confusion"."""
        return class_sums(logits, _labels(batch), filled(batch), self.label_smoothing)

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss in nats a row, accuracy, mcc and f1."""
        return class_figures(sums)

    def rows(self, logits: Float[Array, "B C"], batch: Batch) -> dict[str, Array]:
        """Return logits and label of each row; -1 for a row that holds nothing."""
        return {"scores": logits, "labels": jnp.where(filled(batch) > 0, _labels(batch), -1)}

    def ranked(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return auroc and auprc; none where every row is of one class."""
        held = rows["labels"] >= 0
        labels, scores = rows["labels"][held], rows["scores"][held].astype(np.float64)
        classes = range(1, 2) if scores.shape[1] == 2 else range(scores.shape[1])
        found = []
        for c in classes:
            chosen = labels == c
            if 0 < chosen.sum() < len(chosen):
                # log-odds: as probabilities would, but apart where those round to 1
                against = scores[:, c] - np.logaddexp.reduce(np.delete(scores, c, 1), 1)
                found.append((auroc(against, chosen), auprc(against, chosen)))
        if not found:
            return {}
        return dict(zip(("auroc", "auprc"), map(float, np.mean(found, 0)), strict=True))


class PositionScores(Scores):
    """Scores of an objective that asks for a class at every position, `batch.labels`, where that is not negative.

    The figures are those of `LabelScores`, of positions, without areas under curves.
    """

    headline = "accuracy"
    higher_is_better = True
    figure_names = ("loss", "accuracy", "mcc", "f1")

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Count positions that have a label."""
        return jnp.sum(_asked(batch))

    def sums(self, logits: Float[Array, "B T C"], batch: Batch) -> Sums:
        """Return the sums of `LabelScores`, over positions."""
        return class_sums(logits, jnp.maximum(_labels(batch), 0), _asked(batch))

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss in nats a position, accuracy, mcc and f1."""
        return class_figures(sums)


class ChainScores(PositionScores):
    """Scores of a linear-chain CRF: loss is the mean of -log p(row of classes) over its positions.

    Predictions are those of the likeliest row, by Viterbi's algorithm (`jaxblt.training.objectives.crf`).
    """

    def sums(self, logits: Float[Array, "B T S C"], batch: Batch) -> Sums:
        """Return the sums of `PositionScores`, from the chain's potentials."""
        asked, labels = _asked(batch), jnp.maximum(_labels(batch), 0)
        there = asked > 0
        loss = log_partition(logits, there) - path_score(logits, labels, there)
        return {
            "loss": jnp.sum(loss),
            "weight": jnp.sum(asked),
            CONFUSION: confusion(labels, viterbi(logits, there), asked, logits.shape[-1]),
        }


class NumberScores(Scores):
    """Scores of an objective that asks for a number a row, `batch.labels`.

    Attributes:
      center, scale: of the labels; the model answers (label - center) / scale, and loss is its mean square error.
    """

    center: float
    scale: float
    headline = "rmse"
    higher_is_better = False
    figure_names = ("loss", "rmse", "pearson", "spearman")

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Count rows that hold something."""
        return jnp.sum(filled(batch))

    def losses(self, logits: Float[Array, "B 1"], batch: Batch) -> Float[Array, "B"]:
        """Return squared error of each row in units of the scale."""
        error = logits[:, 0] - (_labels(batch) - self.center) / self.scale
        return error**2

    def sums(self, logits: Float[Array, "B 1"], batch: Batch) -> Sums:
        """Return Σ squared error in units of the scale as "loss", and rows as "weight"."""
        losses = self.losses(logits, batch)
        return {"loss": jnp.sum(losses * filled(batch)), "weight": jnp.sum(filled(batch))}

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return loss, and the root mean square error in the labels' unit."""
        loss = sums["loss"] / sums["weight"]
        return {"loss": loss, "rmse": self.scale * loss**0.5}

    def rows(self, logits: Float[Array, "B 1"], batch: Batch) -> dict[str, Array]:
        """Return the number that the model gives each row, and its label; NaN for a row that holds nothing."""
        labels = jnp.where(filled(batch) > 0, _labels(batch), jnp.nan)
        return {"scores": logits[:, 0] * self.scale + self.center, "labels": labels}

    def ranked(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return Pearson's and Spearman's coefficients; none where labels or answers are all the same."""
        held = np.isfinite(rows["labels"])
        x, y = (rows[name][held].astype(np.float64) for name in ("scores", "labels"))
        if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
            return {}
        return {
            "pearson": float(np.corrcoef(x, y)[0, 1]),
            "spearman": float(np.corrcoef(_ranks(x), _ranks(y))[0, 1]),
        }


def class_losses(
    logits: Float[Array, "*N C"], labels: Int[Array, "*N"], smoothing: float
) -> Float[Array, "*N"]:
    """Return nats of each label, of which a share is spread over all classes."""
    nats = cross_entropy(logits, labels)
    return smoothed(nats, logits, smoothing) if smoothing else nats


def class_sums(
    logits: Float[Array, "*N C"],
    labels: Int[Array, "*N"],
    weights: Float[Array, "*N"],
    smoothing: float = 0.0,
) -> Sums:
    """Return loss, weight, and Float[C, C] weights by label and prediction."""
    return {
        # a row that does not count may have a label that is no class, and its loss is NaN
        "loss": jnp.sum(jnp.where(weights > 0, class_losses(logits, labels, smoothing) * weights, 0)),
        "weight": jnp.sum(weights),
        CONFUSION: confusion(labels, jnp.argmax(logits, -1), weights, logits.shape[-1]),
    }


def confusion(
    labels: Int[Array, "*N"], predicted: Int[Array, "*N"], weights: Float[Array, "*N"], kinds: int
) -> Float[Array, "C C"]:
    """Return weights by label and prediction."""
    chosen = jax.nn.one_hot(predicted, kinds, dtype=jnp.float32)
    asked = jax.nn.one_hot(labels, kinds, dtype=jnp.float32) * weights[..., None]
    # products of 0 and 1 are exact in any precision, their sums are not
    return jnp.einsum("...i,...j->ij", asked, chosen, precision=jax.lax.Precision.HIGHEST)


def class_figures(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return loss, and accuracy, mcc and f1 from the counts C_ij of label i and prediction j.

    With t_i the sum of a row, p_j that of a column, c = Σ C_ii and s = Σ C_ij,
    mcc = (c s - Σ t p) / √((s² - Σ p²)(s² - Σ t²)), and 0 where all labels or all predictions are one class.
    f1 is the mean of 2 C_ii / (t_i + p_i) over the classes that are a label or a prediction.
    """
    xp: Any = np if isinstance(sums[CONFUSION], np.ndarray) else jnp
    share = sums[CONFUSION] / sums["weight"]  # fp32 holds no products of counts of millions
    right, of_labels, predicted = xp.diagonal(share), share.sum(1), share.sum(0)
    accuracy = right.sum()
    spread = (1 - (predicted**2).sum()) * (1 - (of_labels**2).sum())
    held = of_labels + predicted
    f1 = xp.where(held > 0, 2 * right / xp.where(held > 0, held, 1), 0)
    covered = accuracy - (of_labels * predicted).sum()
    return {
        "loss": sums["loss"] / sums["weight"],
        "accuracy": accuracy,
        "mcc": xp.where(spread > 0, covered / xp.sqrt(xp.where(spread > 0, spread, 1)), 0),
        "f1": f1.sum() / (held > 0).sum(dtype=share.dtype),
    }


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Return the place of each score in their order, ties sharing the mean of theirs."""
    from scipy.stats import rankdata  # here: every command would wait half a second for its import

    return rankdata(scores)


def auroc(scores: np.ndarray, chosen: np.ndarray) -> float:
    """Return P(score of a chosen row > that of another), ties counted half: the area under the ROC curve."""
    ranks, count = _ranks(scores), int(chosen.sum())
    return float((ranks[chosen].sum() - count * (count + 1) / 2) / (count * (len(chosen) - count)))


def auprc(scores: np.ndarray, chosen: np.ndarray) -> float:
    """Return the average precision Σ (R_n - R_{n-1}) P_n over the different scores, highest first; no interpolation."""
    order = np.argsort(-scores, kind="stable")
    hits, ends = np.cumsum(chosen[order]), np.flatnonzero(np.diff(scores[order], append=-np.inf))
    precision, recall = hits[ends] / (ends + 1), hits[ends] / chosen.sum()
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def filled(batch: Batch) -> Float[Array, "B"]:
    """Mark rows that hold something by 1; a last batch may be short of rows."""
    return jnp.any(batch.segment_ids > 0, 1).astype(jnp.float32)


def _labels(batch: Batch) -> Any:
    """Return the labels of the one task."""
    assert batch.labels is not None
    assert not isinstance(batch.labels, dict)
    return batch.labels


def _asked(batch: Batch) -> Float[Array, "B T"]:
    return ((_labels(batch) >= 0) & (batch.segment_ids > 0)).astype(jnp.float32)
