"""Timings that nobody looks at: a fixture for tests of what benchmarks write."""

from collections.abc import Callable
from functools import partial

import pytest

from jaxblt import profiling
from pallas_kernels import _bench, _measure

TRIAL_S = 1e-3


@pytest.fixture
def quick_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program runs once, and each of its trials takes `TRIAL_S`; ceilings are of small arrays."""

    def timer(run: Callable[[int], None], warmup: int, least: float) -> Callable[[], float]:
        run(1)
        return lambda: TRIAL_S

    monkeypatch.setattr(_measure, "_slope_timer", timer)
    small = partial(_measure.measure_ceilings, matmul_size=64, copy_bytes=2**16)
    for module in (_bench, profiling):
        monkeypatch.setattr(module, "measure_ceilings", small)
