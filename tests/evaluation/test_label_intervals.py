"""Intervals of figures of labels: beside binomial ones, paired differences, and coverage in a simulation."""

import numpy as np
import pytest
from sklearn.metrics import f1_score, matthews_corrcoef

from jaxblt.evaluation.label_intervals import class_intervals

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, 200)
GOOD = np.where(RNG.random(200) < 0.9, LABELS, 1 - LABELS)
BAD = np.where(RNG.random(200) < 0.6, LABELS, 1 - LABELS)


def test_figures_are_those_of_scikit_learn_and_intervals_about_binomial():
    found = class_intervals(LABELS, GOOD)
    share = (GOOD == LABELS).mean()
    assert found["accuracy"].value == pytest.approx(share)
    assert found["mcc"].value == pytest.approx(matthews_corrcoef(LABELS, GOOD))
    assert found["f1"].value == pytest.approx(f1_score(LABELS, GOOD, average="macro"))
    half = 1.96 * np.sqrt(share * (1 - share) / 200)
    assert found["accuracy"].low == pytest.approx(share - half, abs=0.015)
    assert found["accuracy"].high == pytest.approx(share + half, abs=0.015)


def test_differences_are_paired():
    ahead = class_intervals(LABELS, GOOD, other=BAD)["mcc"]
    assert ahead.low > 0.3
    one_off = GOOD.copy()
    one_off[0] = 1 - one_off[0]
    near = class_intervals(LABELS, GOOD, other=one_off)["accuracy"]
    assert abs(near.value) == pytest.approx(1 / 200)
    assert near.high - near.low < 0.03
    assert near.low <= 0 <= near.high


@pytest.mark.slow(days=28, group="costly", turn="evaluation/test_label_intervals")
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    held = 0
    for _ in range(200):
        right = (RNG.random(120) < 0.8).astype(int)
        low, high = class_intervals(np.ones(120, int), right, resamples=200)["accuracy"][1:]
        held += low <= 0.8 <= high
    assert 0.88 <= held / 200 <= 0.99


def test_bad_arrays_are_named():
    with pytest.raises(ValueError, match=r"of the same records, at least one, got \(200,\), \(3,\)"):
        class_intervals(LABELS, GOOD[:3])
