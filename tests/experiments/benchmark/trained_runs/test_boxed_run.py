"""A run that comes with jaxblt is scored on texts of others."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxblt
from experiments.benchmark.trained_runs.boxed_run import boxed_run
from jaxblt.recipes import get


def test_half_of_a_row_is_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def evaluate(split: str, *, data: Any, max_batches: int) -> dict[str, float]:
        asked.update(split=split, data=data, batches=max_batches)
        return {"bits_per_byte": 1.5}

    run = SimpleNamespace(recipe=get("english"), evaluate=evaluate)
    monkeypatch.setattr(jaxblt, "load", lambda name, dtype: run)
    boxed_run("english", ("x/*/*.txt",), str(tmp_path / "out.json"), batches=3)
    data = asked["data"]
    assert (asked["split"], asked["batches"], data.paths) == ("test", 3, ("x/*/*.txt",))
    assert (data.context, data.batch_size, data.partial) == (2048, 8, "keep")
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (written["benchmark"], written["run"], written["bits_per_byte"]) == ("boxed_run", "english", 1.5)
