"""Bootstrap intervals of figures of labelled records, over the records of a test part."""

from typing import NamedTuple

import numpy as np

from jaxblt.training.objectives.label_scores import CONFUSION, class_figures
from jaxblt.validation import whole

FIGURES = ("accuracy", "mcc", "f1")


class Interval(NamedTuple):
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def class_intervals(
    labels: np.ndarray,
    predictions: np.ndarray,
    *,
    other: np.ndarray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return accuracy, MCC and macro F1 with 95 % intervals, by the percentile bootstrap over records.

    An interval covers the draw of test records, not seeds of training. It is too narrow if near-copies lie in the test
    part.

    Args:
      labels: Int[N], numbers of the classes.
      predictions: Int[N].
      other: Int[N], predictions of another model of the same records: figures are then differences, those of
        `predictions` less those of `other`, paired by record. An interval that holds 0 tells no winner.
      resamples: of the records.
      seed: of the draws.

    Raises:
      ValueError: there is no record, or the arrays are of different lengths.
    """
    whole("resamples", resamples, least=100)
    given = [np.asarray(labels), np.asarray(predictions), *([] if other is None else [np.asarray(other)])]
    if not given[0].size or len({one.shape for one in given}) > 1:
        shapes = ", ".join(str(one.shape) for one in given)
        raise ValueError(f"labels and predictions must be of the same records, at least one, got {shapes}")
    classes, rng = int(max(one.max() for one in given)) + 1, np.random.default_rng(seed)
    count = len(given[0])
    rows = [np.arange(count), *(rng.integers(0, count, count) for _ in range(resamples))]
    drawn = np.array([_figures(*(one[row] for one in given), classes=classes) for row in rows])
    low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    return {
        name: Interval(float(drawn[0, i]), float(low[i]), float(high[i])) for i, name in enumerate(FIGURES)
    }


def _figures(labels: np.ndarray, *predictions: np.ndarray, classes: int) -> np.ndarray:
    """Return the figures of predictions, or of the first less those of the second."""
    found = []
    for one in predictions:
        counts = np.bincount(labels * classes + one, minlength=classes**2).reshape(classes, classes)
        figures = class_figures({CONFUSION: counts.astype(np.float64), "weight": len(labels), "loss": 0.0})
        found.append(np.array([figures[name] for name in FIGURES], np.float64))
    return found[0] if len(found) == 1 else found[0] - found[1]
