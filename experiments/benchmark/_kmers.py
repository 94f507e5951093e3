"""Logistic regression on counts of k-mers (scikit-learn): the baseline without a neural network."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse weights of the penalty, of which validation picks one."""


def count_kmers(sequences: Sequence[bytes], longest: int) -> np.ndarray:
    """Float32[N, 4 + 16 + ... + 4^k], counts of all words of A, C, G, T with up to k letters; others do not count."""
    words = ["".join(letters) for k in range(1, longest + 1) for letters in product("ACGT", repeat=k)]
    columns = {word.encode(): i for i, word in enumerate(words)}
    counts = np.zeros((len(sequences), len(words)), np.float32)
    for row, sequence in zip(counts, sequences, strict=True):
        for k in range(1, longest + 1):
            for start in range(len(sequence) - k + 1):
                column = columns.get(sequence[start : start + k])
                if column is not None:
                    row[column] += 1
    return counts


def score_kmers(parts: dict[str, tuple[list[bytes], np.ndarray]], longest: int) -> dict[str, float]:
    """Figures on "test" of the regression that is fitted on "train"; its penalty is the best on "validation".

    Args:
      parts: sequences and Int[N] classes 0 and 1 of each split.
      longest: letters of a word.
    """
    from sklearn import metrics
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x = {part: count_kmers(sequences, longest) for part, (sequences, _) in parts.items()}
    y = {part: labels for part, (_, labels) in parts.items()}

    def fitted(strength: float) -> Any:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
        return model.fit(x["train"], y["train"])

    models = [fitted(strength) for strength in STRENGTHS]
    best = max(
        models, key=lambda model: metrics.matthews_corrcoef(y["validation"], model.predict(x["validation"]))
    )
    margin, predicted = best.decision_function(x["test"]), best.predict(x["test"])
    return {
        "accuracy": float(metrics.accuracy_score(y["test"], predicted)),
        "mcc": float(metrics.matthews_corrcoef(y["test"], predicted)),
        "f1": float(metrics.f1_score(y["test"], predicted, average="macro")),
        "auroc": float(metrics.roc_auc_score(y["test"], margin)),
        "auprc": float(metrics.average_precision_score(y["test"], margin)),
        "parameters": x["train"].shape[1] + 1,
    }
