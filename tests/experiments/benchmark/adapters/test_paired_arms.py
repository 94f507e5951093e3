"""Intervals and tests of paired arms on simulated documents, whose true differences are known."""

from collections.abc import Callable

import numpy as np
import pytest

from experiments.benchmark.adapters import paired_arms

DOCUMENTS, TRIALS = 40, 200


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(
    "noise",
    [lambda rng: rng.normal(size=DOCUMENTS), lambda rng: rng.exponential(size=DOCUMENTS) - 1],
    ids=["normal", "skewed"],
)
def test_intervals_cover_the_true_difference(
    noise: Callable[[np.random.Generator], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 95 % intervals: 3.5 standard deviations of 200 trials are 5.4 %; few skewed documents cost some more."""
    monkeypatch.setattr(paired_arms, "RESAMPLES", 1000)
    rng, held = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        other = rng.normal(2, 1, DOCUMENTS)
        found = paired_arms.difference(other - 0.1 - 0.3 * noise(rng), other)
        held += found["low"] <= 0.1 <= found["high"]
    assert 0.896 <= held / TRIALS < 1


@pytest.mark.slow(days=28, group="whole runs")
def test_false_discoveries_under_the_null_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six arms without a difference: some q below 5 % in at most 5 % of trials, and 3.5 standard deviations."""
    monkeypatch.setattr(paired_arms, "RESAMPLES", 10)
    rng, found = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        static = rng.normal(2, 1, DOCUMENTS)
        arms = {str(i): static + rng.normal(0, 0.3, DOCUMENTS) for i in range(6)}
        less = paired_arms.compared({"static": static, **arms})["less_than_static"]
        found += any(arm["q"] < 0.05 for arm in less.values())
    assert 0 < found / TRIALS <= 0.104


def test_a_difference_is_found() -> None:
    rng = np.random.default_rng(0)
    static = rng.normal(2, 1, DOCUMENTS)
    found = paired_arms.compared({"static": static, "better": static - 0.1 + rng.normal(0, 0.05, DOCUMENTS)})
    better = found["less_than_static"]["better"]
    assert 0 < better["low"] < 0.1 < better["high"] < better["low"] + 0.04
    assert better["q"] < 1e-6


@pytest.mark.parametrize("gain", [0.0, 0.25])
def test_documents_that_gain_alike_have_no_spread(gain: float) -> None:
    static = 1 + np.arange(16) / 16
    found = paired_arms.compared({"static": static, "same": static - gain})
    less = found["less_than_static"]["same"]
    assert [less["low"], less["high"]] == pytest.approx([gain, gain])
    assert less["q"] == 1 if gain == 0 else less["q"] < 0.05
