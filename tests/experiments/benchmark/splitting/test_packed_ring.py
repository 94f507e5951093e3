"""The benchmark of packed rows in a ring, tiny, on virtual devices: its figures, its gate, what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.splitting import packed_ring

TINY: Any = {"length": 128, "heads": 2, "groups": 1, "head_dim": 8, "implementations": ("xla", "reference")}


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(two_devices: None, tmp_path: Path) -> None:
    out = tmp_path / "packed.json"
    (row,) = packed_ring.packed_ring(out=str(out), documents=(3,), **TINY)["rows"]
    assert json.loads(out.read_text(encoding="utf-8"))["rows"] == [row]
    for name in TINY["implementations"]:
        assert all(1e-4 < error < 1e-2 for error in row[name]["errors"].values())
        for taken in (row[name]["forward"], row[name]["forward_backward"]):
            assert taken["low"] <= taken["median"] <= taken["high"]
            assert taken["median"] > 0


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_errors_are_held_to_the_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packed_ring, "WITHIN", 0.1)
    monkeypatch.setattr(packed_ring, "measure_all", None)
    with pytest.raises(RuntimeError, match=r"xla errs by .*, reference by .*: 0\.1 times that is allowed"):
        packed_ring.packed_ring(out=str(tmp_path / "packed.json"), documents=(3,), **TINY)


def test_rows_without_room_are_refused() -> None:
    for documents in ((0, 3), (129,), ()):
        with pytest.raises(ValueError, match=r"1\.\.128, the tokens of the row, got \("):
            packed_ring.packed_ring(documents=documents, **TINY)


def test_one_implementation_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"held to another: give two, got \('xla',\)"):
        packed_ring.packed_ring(**TINY | {"implementations": ("xla",)})
