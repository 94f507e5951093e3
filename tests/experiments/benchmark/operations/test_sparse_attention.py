"""The benchmark of random blocks, tiny, on the CPU: its figures, its densities and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.operations import sparse_attention as benchmark
from experiments.benchmark.operations.sparse_attention import draw_blocks, every_nth, sparse_attention


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    sizes = {"tokens": 512, "heads": 1, "head_dim": 8, "block": 64}
    calls = sparse_attention(out=str(out), **sizes, densities=(0.5,), dense="xla")["calls"]
    assert json.loads(out.read_text(encoding="utf-8"))["calls"] == calls
    (call,) = calls
    assert 0.3 < call["blocks"] < 0.8
    assert call["error"] < 0.01
    assert call["forward"]["ms"].keys() == call["both"]["ms"].keys() == {"dense", "sparse"}


def test_an_output_that_errs_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "WITHIN", 1e-6)
    sizes = {"tokens": 64, "heads": 1, "head_dim": 8, "block": 16}
    with pytest.raises(RuntimeError, match="xla is off the reference by"):
        sparse_attention(str(tmp_path / "none.json"), **sizes, densities=(0.5,), dense="xla")


@pytest.mark.parametrize("density", [0.5, 0.25, 0.1])
@pytest.mark.parametrize("kind", ["random", "strided"])
def test_so_many_blocks_are_drawn(density: float, kind: str) -> None:
    mask = draw_blocks(density, 4, 1024) if kind == "random" else every_nth(density, 4)
    blocks = np.arange(0, 1024, 4, dtype=np.int32)
    seen = np.tril(np.asarray(mask.rule.sees(blocks[:, None], blocks[None])))
    assert seen.diagonal().all()
    assert seen.sum() / (256 * 257 / 2) == pytest.approx(density, rel=0.05)


@pytest.mark.parametrize(
    "change", [{"tokens": 0}, {"block": 0}, {"densities": (0.0,)}, {"densities": (1.5,)}]
)
def test_sizes_that_mean_nothing_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        sparse_attention(**change)
