"""Classes by words: Markov models, neighbours and a regression, against sums that are written out."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.data import LabelledDataConfig, LabelTask, with_classes
from jaxblt.evaluation.label_baselines import (
    label_baselines,
    read_split,
    score_kmers,
    score_markov,
    score_nearest,
)
from tests.finetuning import records


def draw(rng, count, size, letters="ACGT"):
    return ["".join(letters[i] for i in row).encode() for row in rng.integers(0, len(letters), (count, size))]


def three(sequences, classes, cuts):
    """Parts in the order of the records."""
    y, edges = np.asarray(classes), (0, *cuts, len(sequences))
    names = ("train", "validation", "test")
    return {name: (sequences[a:b], y[a:b]) for name, a, b in zip(names, edges, edges[1:], strict=False)}


@pytest.fixture(scope="module")
def motif():
    """Records half of which have a motif."""
    found = records()
    return three(
        [s.encode() for _, s, _ in found], [int(label == "promoter") for *_, label in found], (120, 180)
    )


def test_a_markov_model_of_each_class_is_its_counts():
    rng = np.random.default_rng(0)
    sequences = draw(rng, 30, 25, "ABC ")
    parts = three(sequences, rng.integers(0, 3, 30), (18, 24))
    (train, y), (test, wanted) = parts["train"], parts["test"]
    predicted = []
    for record in test:
        scores = []
        for c in range(3):
            own = [s for s, of in zip(train, y, strict=True) if of == c]
            words = Counter(s[i : i + 3] for s in own for i in range(len(s) - 2))
            context = Counter(s[i : i + 2] for s in own for i in range(len(s) - 2))
            told = [record[i : i + 3] for i in range(len(record) - 2)]
            bits = sum(math.log((words[w] + 1) / (context[w[:2]] + 4)) for w in told)
            scores.append(bits + math.log(len(own) + 1))
        predicted.append(int(np.argmax(scores)))
    found = score_markov(parts, order=2)
    assert found["accuracy"] == pytest.approx(np.mean(np.array(predicted) == wanted))
    assert found["order"] == 2


def test_the_nearest_record_gives_its_class():
    """Half of each copy is new. What has no neighbour is of the class of those that have none in training."""
    rng = np.random.default_rng(0)
    train, new = draw(rng, 30, 60), draw(rng, 25, 60)
    y = np.repeat([0, 1, 2], 10)
    copies = [train[i][:30] + new[i][:30] for i in range(20)]
    again = [train[i].translate(bytes.maketrans(b"ACGT", b"TGCA"))[::-1].lower() for i in range(20)]
    sequences = [*train[:20], *copies, *train[20:], *again, *copies[:5], *new[20:]]
    classes = [*y[:20], *y[:20], *y[20:], *y[:20], *y[:5], *[2] * 5]
    found = score_nearest(three(sequences, classes, (50, 60)), lengths=(13, 2))
    assert found["k"] == 13
    assert found["accuracy"] == found["mcc"] == 1


def test_a_motif_is_told_by_its_words(motif):
    found = label_baselines(motif)
    assert list(found) == ["markov", "nearest", "kmers"]
    assert found["kmers"]["auroc"] > 0.95
    assert found["markov"]["mcc"] > 0.5
    assert found["nearest"]["k"] in (5, 8, 13, 21)
    assert {"accuracy", "mcc", "f1", "auroc", "auprc"} <= set(found["nearest"])
    small = score_kmers(motif, longest=(2,), strengths=(10.0,))
    assert (small["k"], small["C"], small["parameters"]) == (2, 10.0, 4 + 16 + 1)


def test_classes_that_training_lacks_are_never_predicted():
    rng = np.random.default_rng(0)
    sequences = [
        bytes(letter * 12, "ascii") + tail for letter, tail in zip("ACG" * 10, draw(rng, 30, 9), strict=True)
    ]
    classes = [i % 3 for i in range(24)] + [3] * 6
    for scored in label_baselines(three(sequences, classes, (15, 20))).values():
        assert scored["accuracy"] == 0.4  # of 10 records 4 have a class that training has


def test_a_split_is_read_with_the_numbers_of_its_classes(tmp_path):
    file = tmp_path / "r.csv"
    file.write_text("sequence,label,split\nAC,x,train\nAG,y,train\nAT,y,validation\nTT,x,test\n")
    config = LabelledDataConfig(paths=(str(file),), split="column")
    parts = read_split(with_classes(config))
    assert {part: (found, y.tolist()) for part, (found, y) in parts.items()} == {
        "train": ([b"AC", b"AG"], [0, 1]),
        "validation": ([b"AT"], [1]),
        "test": ([b"TT"], [0]),
    }
    for wrong in ({}, {"target": "number"}, {"tasks": (LabelTask("label"),)}):
        with pytest.raises(ValueError, match="baselines tell one class of each record: give data of"):
            read_split(replace(config, **wrong))
