"""Planted trends, steps and outliers are found in series of runs; stationary series have none."""

import numpy as np
import pytest

from jaxblt.profiling.history import find_trend, trends_of
from jaxblt.profiling.history.trends import ALPHA
from tests.profiling.history.simulated import draw_record

RUNS, NOISE = 20, 0.01


def series(seed: int) -> np.ndarray:
    return 1 + NOISE * np.random.default_rng(seed).standard_normal(RUNS)


def test_a_stationary_series_has_neither_trend_nor_drift() -> None:
    found = [find_trend(series(seed).tolist()) for seed in range(100)]
    most = ALPHA + 3 * (ALPHA / 100) ** 0.5
    assert np.mean([trend.has_trend for trend in found]) <= most
    assert np.mean([trend.has_drift for trend in found]) <= most
    assert find_trend([2.0] * RUNS).slope_p == find_trend([2.0] * RUNS).drift_p == 1


def test_a_planted_trend_is_found_with_its_slope() -> None:
    found = find_trend((series(0) * (1 + 0.004 * np.arange(RUNS))).tolist())
    assert found.has_trend
    assert found.slope == pytest.approx(0.004, rel=0.25)


def test_a_planted_step_is_a_drift_of_its_height() -> None:
    found = find_trend((series(1) * np.where(np.arange(RUNS) < 15, 1, 1.05)).tolist(), window=5)
    assert found.has_drift
    assert found.drift == pytest.approx(0.05, abs=0.015)


def test_planted_outliers_are_the_anomalies() -> None:
    values = series(2)
    values[[4, 17]] *= (1.2, 0.85)
    assert find_trend(values.tolist()).anomalies == (4, 17)
    assert find_trend(series(2).tolist()).anomalies == ()


def test_records_are_read_by_name() -> None:
    draw = np.random.default_rng(0)
    records = [draw_record(draw, {"a": 1 + 0.1 * i, "b": 1.0}, minute=i) for i in range(8)]
    found = trends_of([*records, draw_record(draw, {"a": 1.8, "b": 1.0, "new": 1.0})])
    assert [*found] == ["times/a", "times/b"]
    assert found["times/a"].has_trend
    assert not found["times/b"].has_trend


@pytest.mark.parametrize(("runs", "window"), [(5, None), (12, 7), (12, 1)])
def test_too_few_runs_are_refused(runs: int, window: int | None) -> None:
    with pytest.raises(ValueError, match=f"{runs} runs and windows of"):
        find_trend([1.0] * runs, window=window)


def test_short_series_have_anomalies_by_chance() -> None:
    draw = np.random.default_rng(0)
    found = [bool(find_trend((1 + 0.02 * draw.standard_normal(6)).tolist()).anomalies) for _ in range(150)]
    assert 0.25 < np.mean(found) < 0.4
