"""The statistics on simulated noise, where the truth is known."""

import math

import numpy as np
import pytest

from pallas_kernels._statistics import median_interval, ratio_interval, summarize, tukey_inliers

NOISE = {
    "normal": (lambda rng, shape: 1 + 0.05 * rng.standard_normal(shape), 1.0),
    "lognormal": (lambda rng, shape: rng.lognormal(0.0, 1.0, shape), 1.0),
    "exponential": (lambda rng, shape: 1 + rng.exponential(1.0, shape), 1 + math.log(2)),
}


@pytest.mark.parametrize("trials", [20, 37, 100])
@pytest.mark.parametrize("noise", NOISE)
def test_interval_of_the_median_covers_it_95_percent_of_the_time(noise: str, trials: int) -> None:
    draw, median = NOISE[noise]
    low, high = median_interval(draw(np.random.default_rng(1), (20_000, trials)))
    coverage = np.mean((low <= median) & (median <= high))
    assert 0.93 <= coverage <= 0.97, f"{coverage:.3%}"


@pytest.mark.parametrize("trials", [20, 50])
def test_coverage_holds_with_five_percent_slow_outliers(trials: int) -> None:
    rng = np.random.default_rng(2)
    clean = 1 + 0.05 * rng.standard_normal((20_000, trials))
    slow = rng.random(clean.shape) < 0.05
    low, high = median_interval(np.where(slow, clean * 5, clean))
    coverage = np.mean((low <= 1.0) & (high >= 1.0))
    assert 0.93 <= coverage <= 0.97, f"{coverage:.3%}"


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/test_statistics")
@pytest.mark.parametrize("trials", [20, 100])
def test_ratio_interval_covers_the_ratio(trials: int) -> None:
    """The percentile bootstrap of a median is a little wide: 95-97 % by larger simulations."""
    rng = np.random.default_rng(3)
    repeats = 600
    first, second = (rng.lognormal(0.0, 0.1, (repeats, trials)) for _ in range(2))
    intervals = [
        ratio_interval(2 * a, b, resamples=500, seed=i)
        for i, (a, b) in enumerate(zip(first, second, strict=True))
    ]
    coverage = np.mean([low <= 2 <= high for _, low, high in intervals])
    assert 0.93 <= coverage <= 0.98, f"{coverage:.3%}"


def test_ratio_interval_is_narrower_when_a_round_moves_both_sides_together() -> None:
    rng = np.random.default_rng(4)
    drift = 1 + 0.3 * rng.random(40)
    first, second = (drift * (1 + 0.001 * rng.standard_normal(40)) for _ in range(2))
    _, low, high = ratio_interval(first, second)
    _, apart_low, apart_high = ratio_interval(first, rng.permutation(second))
    assert high - low < 0.5 * (apart_high - apart_low)
    assert low <= 1 <= high


def test_a_ratio_of_trials_a_fifth_of_which_are_lost_in_noise_is_finite() -> None:
    first, second = np.ones(20), np.where(np.arange(20) < 4, 0.0, 1.0)
    assert ratio_interval(first, second) == (1.0, 1.0, 1.0)
    assert ratio_interval(first, np.where(np.arange(20) < 9, -1.0, 1.0))[2] == np.inf


def test_planted_outliers_are_fenced_off_and_at_most_two_percent_of_clean_ones() -> None:
    rng = np.random.default_rng(5)
    samples = 1 + 0.05 * rng.standard_normal((2_000, 100))
    planted = np.zeros(samples.shape, bool)
    planted[:, ::20] = True
    inside = tukey_inliers(np.where(planted, samples + 1.0, samples))
    assert not inside[planted].any()
    assert 1 - inside[~planted].mean() <= 0.02
    assert 1 - tukey_inliers(samples[:, :20]).mean() <= 0.02


def test_summary_reports_known_percentiles_and_counts_outliers() -> None:
    samples = np.arange(1.0, 102.0)
    summary = summarize(np.random.default_rng(6).permutation(samples))
    assert (summary.median, summary.p90, summary.p95, summary.p99) == (51.0, 91.0, 96.0, 100.0)
    assert (summary.trials, summary.outliers) == (101, 0)
    assert summary.mean == pytest.approx(51.0)
    assert summary.std == pytest.approx(samples.std(ddof=1))

    dirty = summarize([*samples, 5000.0])
    assert (dirty.trials, dirty.outliers) == (102, 1)
    assert dirty.mean == pytest.approx(51.0)  # of the inliers
    assert dirty.p99 > 100.0  # of all


def test_exact_interval_where_the_ranks_are_known() -> None:
    """n = 20: ranks 6..15 cover 95.86 %, 7..14 cover 88.47 %; the interpolated ends lie between them."""
    low, high = median_interval(np.arange(1.0, 21.0))
    assert 6.0 < low < 6.5
    assert 14.5 < high < 15.0
    assert low + high == pytest.approx(21.0)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="5 samples are too few"):
        summarize([1.0, 2.0, 3.0, 4.0, 5.0])
