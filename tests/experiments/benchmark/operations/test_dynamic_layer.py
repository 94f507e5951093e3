"""The benchmark of layers that choose blocks, tiny, on the CPU: its figures and what it refuses."""

import json
from pathlib import Path

import pytest

from experiments.benchmark.operations.dynamic_layer import dynamic_layer


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "dynamic.json"
    sizes = {"heads": 4, "groups": 2, "head_dim": 8, "block": 8, "top_k": 2, "window": 16}
    found = dynamic_layer(out=str(out), tokens=(60,), **sizes)
    assert json.loads(out.read_text(encoding="utf-8"))["calls"] == found["calls"]
    assert found["error"] < 0.01
    (call,) = found["calls"]
    assert call["forward"].keys() == call["both"].keys() == {"dense", "sparse", "dense_over_sparse"}
    branches = ("pooled", "chosen", "window")
    assert set(call["parts"]) == {"choose", *branches, *(f"{name} forward+backward" for name in branches)}


def test_sizes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k"):
        dynamic_layer(top_k=0)
