"""The rolling monitor against numpy, and one ruler for ops and library."""

import numpy as np
import pytest

import pallas_kernels._measure
from jaxblt.profiling import Monitor, measure


def test_report_reproduces_numpy_percentiles() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=500)
    monitor = Monitor(horizon=1e6)
    for second, value in enumerate(values):
        monitor.record(float(value), at=float(second))
    report = monitor.report(at=500.0)
    assert report is not None
    assert report.count == 500
    assert report.mean == pytest.approx(values.mean())
    assert [report.p50, report.p95, report.p99] == pytest.approx(np.percentile(values, [50, 95, 99]).tolist())


def test_values_expire_after_the_horizon() -> None:
    monitor = Monitor(horizon=10.0)
    for second in range(31):
        monitor.record(float(second), at=float(second))
    report = monitor.report(at=30.0)
    assert report is not None
    assert (report.count, report.mean) == (11, 25.0)  # seconds 20..30
    late = monitor.report(at=39.5)
    assert late is not None
    assert (late.count, late.p50) == (1, 30.0)
    assert monitor.report(at=41.0) is None


def test_clock_of_its_own() -> None:
    monitor = Monitor(horizon=60.0)
    monitor.record(2.5)
    report = monitor.report()
    assert report is not None
    assert report.p99 == 2.5


def test_horizon_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive number of seconds, got 0"):
        Monitor(horizon=0)


def test_library_and_ops_share_one_ruler() -> None:
    assert measure is pallas_kernels._measure.measure
