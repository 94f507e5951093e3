"""Classes of records without a neural network: what a fine-tuned model has to beat on the same split.

Each baseline is fitted to the training part, and scored on the test part. Matthews's correlation on the validation part
picks its settings. Words are those of `jaxblt.data.words`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, diags, hstack

from jaxblt.data.labelled import LabelledDataConfig, read_parts, read_targets
from jaxblt.data.words import find_words, kind_of
from jaxblt.training.objectives.label_scores import CONFUSION, LabelScores, class_figures

Parts = Mapping[str, tuple[Sequence[bytes], np.ndarray]]
"""Sequences and Int[N] numbers of their classes of "train", "validation" and "test"."""

Scores = Mapping[str, np.ndarray]
"""Float[N, C] of "validation" and "test": the class with the largest score of a row is the prediction."""

INSTALL = "which comes with pip install 'jaxblt[baselines]'"
ORDER = 3
"""Letters of context of the Markov models."""
NEAREST = (5, 8, 13, 21)
"""Letters of the words that neighbours share, of which validation picks one."""
LONGEST = (3, 4, 5, 6)
"""Letters of the longest words of the regression, of which validation picks one."""
STRENGTHS = (0.1, 1.0, 10.0, 100.0)
"""Inverse weights of the regression's penalty, of which validation picks one."""
TIE = 1e-6
"""The weight of the class of records without a neighbour, beside a similarity."""
ABSENT = 100.0
"""The distance of the score of a class that training lacks below all others."""
ROWS = 256
"""Records whose neighbours are sought at once."""


def read_split(data: LabelledDataConfig) -> Parts:
    """Return the records of labelled data with the numbers of their classes.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: bad data, or labels that are not of one task of classes; classes must not be open.
    """
    if data.tasks or data.target != "class" or data.is_open:
        raise ValueError(
            "baselines tell one class of each record: give data of target 'class' without tasks, from with_classes"
        )
    return {
        part: ([record.sequence for record in records], np.array(read_targets(data, records), np.int64))
        for part, records in read_parts(data).items()
    }


def label_baselines(parts: Parts, *, longest: Sequence[int] = LONGEST) -> dict[str, dict[str, float]]:
    """Return figures of the baselines "markov", "nearest" and "kmers" on the test part.

    Args:
      parts: the split.
      longest: see `score_kmers`.

    Raises:
      ImportError: scikit-learn is not installed.
    """
    return {
        "markov": score_markov(parts),
        "nearest": score_nearest(parts),
        "kmers": score_kmers(parts, longest=longest),
    }


def score_markov(parts: Parts, *, order: int = ORDER) -> dict[str, float]:
    """Return the figures of a Markov model of each class, with how often classes occur as prior.

    A record's score for a class is log p(class) + Σ log p(letter | the `order` letters before it, class), without its
    first `order` letters. Of n letters c behind a context and N letters in all, p = (n + 1) / (N + letters).
    """
    words = _count(parts, order + 1)
    x, y, classes = words.x["train"], parts["train"][1], _classes(parts)
    of_class = csr_matrix((np.ones(len(y)), (y, np.arange(len(y)))), shape=(classes, len(y)))
    counts = (of_class @ x).toarray()
    _, context = np.unique(words.code // words.base, return_inverse=True)
    seen = np.stack([np.bincount(context, row) for row in counts])
    log_p = np.log(counts + 1) - np.log(seen[:, context] + words.base)
    prior = np.log(np.bincount(y, minlength=classes) + 1)
    scores = {part: words.x[part] @ log_p.T + prior for part in ("validation", "test")}
    return {**score_classes(scores["test"], parts["test"][1]), "order": order}


def score_nearest(parts: Parts, *, lengths: Sequence[int] = NEAREST) -> dict[str, float]:
    """Return figures of the rule that gives each record the class of the nearest training record.

    Records of n and m words that share s have the similarity s / √(n m), on both strands of DNA. The nearest record is
    the most similar one. A record that shares no word gets the most common class of training records without a
    neighbour, or of all if there are none. If long words do as well as other models, near-copies lie on both sides of
    the split.
    """
    y, classes = parts["train"][1], _classes(parts)

    def fits() -> Iterable[tuple[dict[str, float], Scores]]:
        for length in lengths:
            held = held_words(parts, length)
            x = {part: unit_rows(rows) for part, rows in held.items()}
            shared = np.asarray(held["train"].sum(0)).ravel() > 1
            alone = np.bincount(y[held["train"] @ shared == 0], minlength=classes)
            most = alone + np.bincount(y, minlength=classes) / len(y)
            scores = {part: _similar(x[part], x["train"], y, classes) for part in ("validation", "test")}
            yield {"k": length}, {part: found + TIE * most / most.sum() for part, found in scores.items()}

    return _best(fits(), parts)


def score_kmers(
    parts: Parts, *, longest: Sequence[int] = LONGEST, strengths: Sequence[float] = STRENGTHS
) -> dict[str, float]:
    """Return figures of a logistic regression on counts of words of 1 to k letters.

    It uses scikit-learn. Counts c enter as 1 + log c times the inverse frequency of the word in training (TF-IDF).
    Counts of words of one length are scaled to length 1.

    Args:
      parts: the split.
      longest: numbers k, of which validation picks one.
      strengths: inverse weights of the penalty, of which validation picks one.

    Raises:
      ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.feature_extraction.text import TfidfTransformer
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ImportError(f"{error}: the regression is fitted by scikit-learn, {INSTALL}") from error

    def weighed(length: int) -> dict[str, Any]:
        counts = _count(parts, length).x
        seen = np.flatnonzero(counts["train"].sum(0))
        scaled = TfidfTransformer(sublinear_tf=True).fit(counts["train"][:, seen])
        return {part: scaled.transform(rows[:, seen]) for part, rows in counts.items()}

    def fits() -> Iterable[tuple[dict[str, float], Scores]]:
        words = [weighed(length) for length in range(1, max(longest) + 1)]
        for k in longest:
            x: Any = {part: hstack([of[part] for of in words[:k]]).tocsr() for part in parts}
            for strength in strengths:
                model = LogisticRegression(C=strength, max_iter=2000).fit(x["train"], parts["train"][1])
                found = {p: _all_classes(model, x[p], _classes(parts)) for p in ("validation", "test")}
                yield {"k": k, "C": strength, "parameters": x["train"].shape[1] + 1}, found

    return _best(fits(), parts)


class _Counts(NamedTuple):
    """The number of times that each record has each word, Int[N, W] by part; codes of the words, and letters a word."""

    x: dict[str, Any]
    code: np.ndarray
    base: int


def _count(parts: Parts, length: int, *, both_strands: bool = False) -> _Counts:
    sequences = [sequence for found, _ in parts.values() for sequence in found]
    words = find_words(sequences, length, kind_of(sequences), both_strands=both_strands)
    code, column = np.unique(words.code, return_inverse=True)
    ones, shape = np.ones(len(column)), (len(sequences), len(code))
    counts = csr_matrix((ones, (words.record, column)), shape=shape)
    ends = np.cumsum([0, *(len(found) for found, _ in parts.values())])
    return _Counts({part: counts[ends[i] : ends[i + 1]] for i, part in enumerate(parts)}, code, words.base)


def _classes(parts: Parts) -> int:
    return 1 + max(int(y.max(initial=0)) for _, y in parts.values())


def held_words(parts: Parts, length: int) -> dict[str, Any]:
    """Return 1 for each word that each record has, on both strands of DNA: sparse Float[N, W] by part."""
    return {part: rows.sign() for part, rows in _count(parts, length, both_strands=True).x.items()}


def unit_rows(rows: Any) -> Any:
    """Return rows of length 1; empty ones stay."""
    length = np.sqrt(np.asarray(rows.multiply(rows).sum(1)).ravel())
    return diags(1 / np.maximum(length, 1e-9)) @ rows


def _similar(rows: Any, train: Any, y: np.ndarray, classes: int) -> np.ndarray:
    """Return the largest product of each row with a training row of each class, Float[N, C]."""
    order = np.argsort(y, kind="stable")
    present, begins = np.unique(y[order], return_index=True)
    turned, found = train[order].T.tocsr(), np.zeros((rows.shape[0], classes))
    for start in range(0, rows.shape[0], ROWS):
        products = (rows[start : start + ROWS] @ turned).toarray()
        found[start : start + ROWS, present] = np.maximum.reduceat(products, begins, axis=1)
    return found


def _all_classes(model: Any, x: Any, classes: int) -> np.ndarray:
    """Return the scores of a regression, Float[N, C]; classes that training lacks have none."""
    margin = model.decision_function(x)
    scores = np.full((len(margin), classes), margin.min() - ABSENT)
    scores[:, model.classes_] = margin if margin.ndim == 2 else np.stack([np.zeros_like(margin), margin], 1)
    return scores


def _best(fits: Iterable[tuple[dict[str, float], Scores]], parts: Parts) -> dict[str, float]:
    """Return the test figures of the fit with the best validation MCC, and its settings."""

    def mcc(fit: tuple[dict[str, float], Scores]) -> float:
        return score_classes(fit[1]["validation"], parts["validation"][1])["mcc"]

    settings, scores = max(fits, key=mcc)
    return {**score_classes(scores["test"], parts["test"][1]), **settings}


def score_classes(scores: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return accuracy, mcc and f1; auroc and auprc where more than one class is there."""
    counts = np.zeros((scores.shape[1],) * 2)
    np.add.at(counts, (y, scores.argmax(1)), 1)
    found = class_figures({CONFUSION: counts, "weight": counts.sum(), "loss": np.nan})
    areas = LabelScores().ranked({"scores": scores, "labels": y})
    return {name: float(found[name]) for name in ("accuracy", "mcc", "f1")} | areas
