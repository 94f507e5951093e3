"""Students of one seed differ by their teacher alone, and are compared with each other."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxblt
from experiments.benchmark.trained_runs import distillation as module
from experiments.benchmark.trained_runs.distillation import Settings, distillation, student, taught
from jaxblt.recipes import get


def test_students_of_a_seed_differ_by_their_teacher() -> None:
    settings = Settings(steps=30)
    alone = student(get("genes"), 2, settings)
    assert (alone.model.stack.num_layers, alone.data.seed, alone.train.seed) == (3, 2, 2)
    other = taught(alone, "genes", settings)
    assert other.reference is not None
    assert (other.reference.run, other.reference.weight) == ("genes", 9.0)
    assert replace(other, reference=None) == alone


def test_the_gain_is_of_one_seed_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scored = {"bits_per_byte": 1.8, "bytes": 100.0}
    run = SimpleNamespace(recipe=get("genes"), params={}, evaluate=lambda split, **asked: scored)
    monkeypatch.setattr(jaxblt, "load", lambda name, dtype: run)
    monkeypatch.setattr("jaxblt.training.flops.count_params", lambda params: (9, 9))

    def train(recipe: Any, run_dir: Path, asked: dict[str, Any]) -> dict[str, Any]:
        assert (asked["data"].paths, asked["max_batches"]) == (("genes/*.fa",), 64)
        assert run_dir.parent == tmp_path / "work"
        return {"bits_per_byte": 1.9 + recipe.train.seed / 100 + (recipe.reference is None) / 50}

    monkeypatch.setattr(module, "train", train)
    found = distillation("genes", str(tmp_path / "out.json"), str(tmp_path / "work"))
    assert [(one["model"], one["seed"]) for one in found["runs"][:3]] == [
        ("scratch", 0),
        ("distilled", 0),
        ("scratch", 1),
    ]
    assert found["gain"] == pytest.approx({"value": 0.02, "low": 0.02, "high": 0.02})
