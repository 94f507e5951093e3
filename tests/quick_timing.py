"""Timings that nobody looks at: a fixture for tests of what benchmarks write."""

from functools import partial

import pytest

from jaxblt import profiling
from pallas_kernels import _bench, _measure

TRIALS_S = (2e-4, 8e-4, 3e-3)


@pytest.fixture
def quick_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are short, longer only where they are lost in what else the machine does; ceilings are of small arrays."""
    monkeypatch.setattr(_measure, "_SLOPE_SECONDS", (*TRIALS_S, *_measure._SLOPE_SECONDS))
    small = partial(_measure.measure_ceilings, matmul_size=64, copy_bytes=2**16)
    for module in (_bench, profiling):
        monkeypatch.setattr(module, "measure_ceilings", small)
