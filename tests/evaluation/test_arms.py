"""Intervals and tests of paired arms on simulated documents, whose true differences are known."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxblt.evaluation import arms, compare_arms

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
    monkeypatch.setattr(arms, "RESAMPLES", 1000)
    rng, held = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        other = rng.normal(2, 1, DOCUMENTS)
        found = compare_arms({"base": other, "arm": other - 0.1 - 0.3 * noise(rng)}, "base")["arm"]
        held += found["low"] <= 0.1 <= found["high"]
    assert 0.896 <= held / TRIALS < 1


@pytest.mark.slow(days=28, group="whole runs")
def test_false_discoveries_under_the_null_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six arms without a difference: some q below 5 % in at most 5 % of trials, and 3.5 standard deviations."""
    monkeypatch.setattr(arms, "RESAMPLES", 10)
    rng, found = np.random.default_rng(0), 0
    for _ in range(TRIALS):
        static = rng.normal(2, 1, DOCUMENTS)
        equal = {str(i): static + rng.normal(0, 0.3, DOCUMENTS) for i in range(6)}
        less = compare_arms({"static": static, **equal}, "static")
        found += any(arm["q"] < 0.05 for arm in less.values())
    assert 0 < found / TRIALS <= 0.104


def test_a_difference_is_found() -> None:
    rng = np.random.default_rng(0)
    static = rng.normal(2, 1, DOCUMENTS)
    scored = {"static": static, "better": static - 0.1 + rng.normal(0, 0.05, DOCUMENTS)}
    better = compare_arms(scored, "static", parameters={"static": 100, "better": 105})["better"]
    assert 0 < better["low"] < 0.1 < better["high"] < better["low"] + 0.04
    assert better["q"] < 1e-6


@pytest.mark.parametrize("gain", [0.0, 0.25])
def test_documents_that_gain_alike_have_no_spread(gain: float) -> None:
    static = 1 + np.arange(16) / 16
    less = compare_arms({"static": static, "same": static - gain}, "static")["same"]
    assert [less["low"], less["high"]] == pytest.approx([gain, gain])
    assert less["q"] == 1 if gain == 0 else less["q"] < 0.05


def test_arms_of_other_sizes_and_single_ones_are_refused() -> None:
    scored = {"static": np.ones(4), "wide": np.ones(4)}
    with pytest.raises(
        ValueError, match=r"parameters \{'wide': 106\} differ from 100 of 'static' by more than 5%"
    ):
        compare_arms(scored, "static", parameters={"static": 100, "wide": 106})
    with pytest.raises(ValueError, match=r"arms are compared with 'none', got \['static', 'wide'\]"):
        compare_arms(scored, "none")
    with pytest.raises(ValueError, match=r"no size of \['static'\]: give one for each arm"):
        compare_arms(scored, "static", parameters={"wide": 100})


@pytest.mark.parametrize("other", [np.ones(3), np.array([1, 1, 1, np.nan]), np.ones((4, 2))], ids=str)
def test_arms_of_other_documents_are_refused(other: np.ndarray) -> None:
    with pytest.raises(
        ValueError, match=r"arm 'other' has numbers of shape \(.*, the base \(4,\): give a finite"
    ):
        compare_arms({"static": np.ones(4), "other": other}, "static")
