"""Scores of runs on stories at several lengths."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import get
from experiments.benchmark.__main__ import main
from experiments.benchmark.memory import babilong as script
from jaxblt.data import make_dataset
from jaxblt.data.tasks import Babilong
from jaxblt.models import titan
from jaxblt.training.flops import count_params
from jaxblt.training.loop import fit
from jaxblt.training.recipe import Recipe
from tests.data.tasks.stories import write_stories


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_stories(tmp_path)
    recipe = get("babilong")
    task = Babilong(
        path=str(tmp_path), books=str(tmp_path / "books"), subset="en", min_bytes=64, max_bytes=128
    )
    train = replace(recipe.train, steps=2, dtype="float32", eval_every=0, checkpoint_every=2)
    model = titan("mag", dim=8, num_layers=1, window=8, chunk_size=8, mlp_dim=0)
    optimizer = replace(recipe.optimizer, warmup_steps=1)
    return replace(
        recipe,
        model=model,
        data=replace(recipe.data, task=task, seq_len=130, batch_size=8),
        train=train,
        optimizer=optimizer,
    )


def test_rows_have_the_length_that_is_asked_for(recipe: Recipe) -> None:
    data = script.at_length(SimpleNamespace(recipe=recipe), 512, 5)
    batch = make_dataset(data, split="test", mode="eval").batch(0)
    assert batch.inputs.shape == (5, 514)
    sizes = (np.asarray(batch.segment_ids) > 0).sum(1)
    assert np.all(sizes > 480)
    assert script.at_length(SimpleNamespace(recipe=recipe), 2**20, 5).batch_size == 1
    with pytest.raises(ValueError, match="'mqar' learned another task"):
        script.at_length(SimpleNamespace(recipe=get("mqar")), 512, 5)


def test_windows_alone_are_as_large() -> None:
    """As the recipe's docstring asks for them."""
    model = get("babilong").model
    windows = replace(model, stack=replace(model.stack, pattern="W", mlp_dim=1408))
    sizes = []
    for one in (model, windows):
        shapes = jax.eval_shape(one.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        sizes.append(count_params(nn.meta.unbox(shapes["params"]))[0])
    assert max(sizes) < 1.02 * min(sizes)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures_of_two_lengths(recipe: Recipe, tmp_path: Path) -> None:
    fit(recipe, tmp_path / "run")
    out = tmp_path / "babilong.json"
    main(["babilong", str(tmp_path / "run"), "--out", str(out), "--lengths", "128", "256", "--rows", "6"])
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert (run["pattern"], run["step"]) == ("J", 2)
    assert [(at["bytes"], at["asked"]) for at in run["lengths"]] == [(128, 6), (256, 6)]
    assert all(at["low"] <= at["accuracy"] == at["right"] / 6 <= at["high"] for at in run["lengths"])
    assert (found["task"], set(found["majority"])) == (1, {"128", "256"})


def test_runs_of_different_tasks_are_refused(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(recipe, data=replace(recipe.data, task=replace(recipe.data.task, task=2)))
    runs = {"one": SimpleNamespace(recipe=recipe), "two": SimpleNamespace(recipe=other)}
    monkeypatch.setattr("jaxblt.load", runs.get)
    with pytest.raises(
        ValueError, match=r"runs are compared on one task, these learned .*: score them apart"
    ):
        script.babilong(("one", "two"), "out.json")


def test_nothing_to_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to score: 0 runs"):
        script.babilong((), str(tmp_path / "out.json"))
