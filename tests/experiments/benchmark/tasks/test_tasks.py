"""Runs on one task side by side."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from configs import get
from experiments.benchmark.__main__ import main
from experiments.benchmark.tasks import tasks as script
from jaxblt.data import TaskDataConfig, make_dataset
from jaxblt.data.tasks import Babi, Parity
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.loop import fit
from jaxblt.training.recipe import Recipe
from tests.training.tiny import tiny_recipe


def story(statements: int, place: str) -> str:
    """So many statements and a question."""
    said = "".join(f"{n + 1} Ann went to the {place}.\n" for n in range(statements))
    return f"{said}{statements + 1} Where is Ann? \t{place}\t1\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "en").mkdir()
    for number in (1, 2):
        for part, count in (("train", 40), ("test", 6)):
            text = "".join(story(i % 4 + 1, "attic" if i % 3 else "barn") for i in range(count))
            (tmp_path / "en" / f"qa{number}_{part}.txt").write_text(text)
    task = Babi(path=str(tmp_path), tasks=(1, 2), max_words=60)
    data = TaskDataConfig(task=task, seq_len=64, batch_size=4, buckets=(16, 32), max_tokens=64)
    recipe = get("babi")
    train = replace(recipe.train, steps=2, eval_every=0, checkpoint_every=2)
    optimizer = replace(recipe.optimizer, warmup_steps=1)
    model = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=0))
    return replace(recipe, model=model, data=data, train=train, optimizer=optimizer)


def test_tokens_are_those_of_the_batches(recipe: Recipe) -> None:
    data = make_dataset(recipe.data, split="train", mode="train")
    batches = [np.asarray(data.batch(step).segment_ids) for step in range(60)]
    assert len({ids.shape for ids in batches}) > 1
    for step in (0, 1, 7, 60):
        read = script.tokens_read(SimpleNamespace(recipe=recipe, step=step))
        assert read["positions"] == sum(ids.size for ids in batches[:step])
        assert read["tokens"] == sum(np.count_nonzero(ids) for ids in batches[:step])


def test_drawn_examples_have_no_tokens_to_count() -> None:
    drawn = TaskDataConfig(task=Parity(max_bits=10), seq_len=12, batch_size=8)
    run = SimpleNamespace(recipe=replace(tiny_recipe(), data=drawn), step=3)
    assert script.tokens_read(run) == {"positions": 3 * 8 * 12, "tokens": None}


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures_of_two_runs(recipe: Recipe, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("one", "two")]
    for folder in folders:
        fit(recipe, folder, devices=jax.devices()[:1])
    out = tmp_path / "tasks.json"
    main(["tasks", *folders, "--out", str(out)])
    found = json.loads(out.read_text())
    assert [run["run"] for run in found["runs"]] == folders
    for run in found["runs"]:
        assert (run["pattern"], run["step"]) == ("R", 2)
        assert run["parameters"] > 260 * 8
        assert run["minutes"] > 0
        assert 0 <= run["scores"]["worst"] <= run["scores"]["exact_match"] <= 1
        assert {"solved", "exact_match_qa1", "exact_match_qa2"} <= set(run["scores"])
    for name in ("exact_match", "exact_match_qa1", "worst"):
        assert found["majority"][name] == pytest.approx(4 / 6)  # of six stories four are about the attic


def test_answers_of_an_endless_number_of_orders_are_not_all_counted(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count(task: Any, split: str, *, most: int | None) -> None:
        asked.append(most)
        raise InterruptedError

    monkeypatch.setattr("jaxblt.load", lambda folder: SimpleNamespace(recipe=recipe))
    monkeypatch.setattr("jaxblt.evaluation.tasks.majority_baseline", count)
    with pytest.raises(InterruptedError):
        script.tasks(("a",), out="never.json")
    assert asked == [script.MOST]


def test_runs_of_different_tasks_are_refused(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(recipe, data=replace(recipe.data, task=replace(recipe.data.task, tasks=(1,))))
    runs: dict[str, Any] = {"a": SimpleNamespace(recipe=recipe), "b": SimpleNamespace(recipe=other)}
    monkeypatch.setattr("jaxblt.load", lambda folder: runs[folder])
    with pytest.raises(ValueError, match="compared on one task"):
        script.tasks(("a", "b"), out="never.json")
    with pytest.raises(ValueError, match="nothing to score"):
        script.tasks((), out="never.json")
    with pytest.raises(ValueError, match="'tiny' learned no task: its data is a DataConfig"):
        script.task_of(SimpleNamespace(recipe=tiny_recipe()))  # pyright: ignore[reportArgumentType]
