"""The table of a train step by kernel."""

import pytest

from experiments.benchmark.figures.kernel_table import told
from jaxblt.profiling import KernelTotal, OpTotal


def test_kernels_are_told_a_step_and_small_ones_by_kind_only():
    rows = [
        KernelTotal("matrix products", "forward", "cublas", "mlp/up/dot_general", 20, 0.6),
        KernelTotal("matrix products", "backward", "cublas", "mlp/up/dot_general", 20, 0.3995),
        KernelTotal("copies", "update", "copy", "", 10, 0.0005),
    ]
    launched = [OpTotal("gemm", 40, 0.9995), OpTotal("memcpy", 10, 0.0005)]
    found = told(rows, launched, 10)
    assert found["launched"] == [{"name": "gemm", "count": 4, "seconds": pytest.approx(0.09995)}]
    assert found["device_seconds"] == pytest.approx(0.1)
    assert found["kinds"]["matrix products"] == pytest.approx({"seconds": 0.09995, "share": 0.9995})
    assert found["passes"]["update"]["seconds"] == pytest.approx(0.00005)
    assert [(row["during"], row["count"]) for row in found["kernels"]] == [("forward", 2), ("backward", 2)]
    assert sum(row["share"] for row in found["kernels"]) == pytest.approx(0.9995)
