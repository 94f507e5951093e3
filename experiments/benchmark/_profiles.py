"""Classes by words of up to k letters, without alignment: the nearest mean profile, and logistic regression."""

import time
from typing import Any

import numpy as np

from experiments.benchmark._labelled import Parts

STRENGTHS = (10.0, 100.0)
"""Inverse weights of the regression's penalty, of which validation picks one."""


def words(longest: int) -> Any:
    """Counts of words of each length as log(1 + count), weighted by rarity and scaled to length 1 (TF-IDF)."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import FeatureUnion

    options = {"analyzer": "char", "lowercase": False, "sublinear_tf": True}
    return FeatureUnion(
        [(f"{k}", TfidfVectorizer(**options, ngram_range=(k, k))) for k in range(1, longest + 1)]
    )


def score_profiles(parts: Parts, longest: int) -> dict[str, dict[str, float]]:
    """Figures on "test" of "nearest" and "regression", fitted on "train"; "validation" picks their options.

    Args:
      parts: sequences and classes of each split.
      longest: letters of the longest words; the nearest profile has words of one length, the regression of all.
    """
    text = {part: [sequence.decode() for sequence in found] for part, (found, _) in parts.items()}
    features = {}
    for k in range(1, longest + 1):
        made = words(k).transformer_list[-1][1].fit(text["train"])
        features[k] = {part: made.transform(found) for part, found in text.items()}
    y = {part: classes for part, (_, classes) in parts.items()}
    fits = {
        "nearest": [(_nearest, features[k]) for k in features],
        "regression": [(_regression(strength), _beside(features)) for strength in STRENGTHS],
    }
    return {name: _best(options, y) for name, options in fits.items()}


def _beside(features: dict[int, dict[str, Any]]) -> dict[str, Any]:
    from scipy.sparse import hstack

    return {part: hstack([found[part] for found in features.values()]).tocsr() for part in features[1]}


def _best(options: list[Any], y: dict[str, np.ndarray]) -> dict[str, float]:
    from sklearn import metrics

    begun, best = time.perf_counter(), (-1.0, np.zeros(0), 0)
    for fit, x in options:
        predict = fit(x["train"], y["train"])
        accuracy = float(metrics.accuracy_score(y["validation"], predict(x["validation"])))
        if accuracy > best[0]:
            best = (accuracy, predict(x["test"]), x["train"].shape[1])
    return {
        "accuracy": float(metrics.accuracy_score(y["test"], best[1])),
        "mcc": float(metrics.matthews_corrcoef(y["test"], best[1])),
        "f1": float(metrics.f1_score(y["test"], best[1], average="macro")),
        "features": best[2],
        "seconds": time.perf_counter() - begun,
    }


def _nearest(x: Any, y: np.ndarray) -> Any:
    """The class whose mean profile has the largest cosine with a record's."""
    from sklearn.preprocessing import normalize

    classes = np.unique(y)
    means: Any = normalize(np.stack([np.asarray(x[y == c].mean(0))[0] for c in classes]))
    return lambda rows: classes[np.argmax(rows @ means.T, 1)]


def _regression(strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return lambda x, y: LogisticRegression(C=strength, max_iter=300).fit(x, y).predict
