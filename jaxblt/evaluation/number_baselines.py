"""Numbers of records without a neural network: what a fine-tuned regression has to beat on the same split.

Each baseline is fitted to the training part, and scored on the test part; validation picks its settings.
"""

from typing import Any

import numpy as np

from jaxblt.data.labelled import LabelledDataConfig, number_statistics, read_parts, read_targets
from jaxblt.data.words import kind_of
from jaxblt.evaluation.label_baselines import NEAREST, ROWS, TIE, Parts, held_words, unit_rows
from jaxblt.training.finetune import words_of
from jaxblt.training.objectives.label_scores import NumberScores
from jaxblt.training.start.word_regression import answer_test

SHORT = (2, 3)
"""Letters of the words of proteins and text that neighbours share, beside `NEAREST`: mutants share long ones."""


def number_baselines(data: LabelledDataConfig) -> dict[str, dict[str, float]]:
    """Return RMSE, Pearson's and Spearman's coefficients of "mean", "nearest" and "words" on the test part.

    "mean" is the mean of training. "nearest" is the number of the training record that shares the most words, or the
    mean of several such records. "words" is a ridge regression on words and on letters at places. A head that reads
    words starts as this regression.

    Raises:
      ValueError: the data are no numbers of records, or have no validation records.
    """
    if data.tasks or data.target != "number":
        raise ValueError(
            f"number baselines tell one number of each record, and data.target is {data.target!r}: use label_baselines"
        )
    parts = {
        name: ([record.sequence for record in records], np.array(read_targets(data, records), np.float64))
        for name, records in read_parts(data).items()
    }
    if not parts["validation"][0]:
        raise ValueError(
            "validation picks the settings of number baselines, and data has no validation record: change the split, "
            "or leave baselines out (--no-baselines)"
        )
    y = parts["test"][1]
    mean = np.full(len(y), parts["train"][1].mean())
    found = {"mean": (mean, y), "nearest": (_nearest(parts), y), "words": _words(data)}
    return {name: score_numbers(*each) for name, each in found.items()}


def score_numbers(answers: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return RMSE and both coefficients, which are 0 where all answers are equal."""
    found = {"rmse": float(np.sqrt(np.mean((answers - y) ** 2))), "pearson": 0.0, "spearman": 0.0}
    return found | NumberScores().ranked({"scores": answers, "labels": y})


def _nearest(parts: Parts) -> np.ndarray:
    """Return the numbers of neighbours, by words of the length that is best on validation."""
    is_dna = kind_of(parts["train"][0]) == "dna"
    answers, errors = [], []
    for length in NEAREST if is_dna else (*SHORT, *NEAREST):
        x = {name: unit_rows(rows) for name, rows in held_words(parts, length).items()}
        found = {name: _of_most(x[name], x["train"], parts["train"][1]) for name in ("validation", "test")}
        errors.append(float(np.sum((found["validation"] - parts["validation"][1]) ** 2)))
        answers.append(found["test"])
    return answers[int(np.argmin(errors))]


def _of_most(rows: Any, train: Any, y: np.ndarray) -> np.ndarray:
    """Return the mean number of the training records that each row is most similar to."""
    found = []
    for start in range(0, rows.shape[0], ROWS):
        similarity = (rows[start : start + ROWS] @ train.T).toarray()
        is_best = similarity >= similarity.max(1, keepdims=True) - TIE
        found.append(is_best @ y / is_best.sum(1))
    return np.concatenate(found)


def _words(data: LabelledDataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the regression's numbers of test records, and their own, both in the order of the buckets."""
    words = words_of(data)
    assert words is not None, "only classes of positions have no words"
    center, scale = number_statistics(data)
    found, y = answer_test(data, words, 1, center=center, scale=scale)
    return found[:, 0] * scale + center, y * scale + center
