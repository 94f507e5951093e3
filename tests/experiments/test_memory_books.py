"""Models of one size on books, with a memory and without: their sizes, and complete figures."""

import json
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import configs
from experiments.benchmark import memory_books as script
from experiments.benchmark.__main__ import main
from jaxblt.training.flops import count_params


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_models_are_of_one_size() -> None:
    sizes = {}
    for name, model in script.models_of(script.Settings()).items():
        shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        sizes[name] = count_params(nn.meta.unbox(shapes["params"]))[0]
    assert set(sizes) == {"window", "mag", "mal", "mac", "slots"}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "validation", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "1.txt").write_bytes(b"".join(b"%d bottles of beer. " % n for n in range(60)))
    base = configs.get("books_transformer")
    data = replace(base.data, paths=(str(tmp_path / "*/*.txt"),))
    train = replace(base.train, dtype="float32", log_every=1)
    small = replace(base, data=data, train=train, optimizer=replace(base.optimizer, warmup_steps=1))
    monkeypatch.setitem(configs.RECIPES, "small_books", lambda: small)
    sizes = ["recipe=small_books", "dim=8", "num-layers=2", "window=8", "chunk-size=8", "length=64"]
    options = [f"--settings.{size}" for size in (*sizes, "rows=2", "steps=2", "max-rows=3")]
    lengths = ["--contexts", "32", "128", "--targets", "16"]
    out = tmp_path / "out.json"
    main(["memory_books", str(tmp_path / "runs"), "--out", str(out), "--models", "mal", *lengths, *options])
    (run,) = json.loads(out.read_text())["models"]
    assert (run["model"], run["step"]) == ("mal", 2)
    assert [at["context"] for at in run["contexts"]] == [32, 128]
    assert run["contexts"][0]["gain"]["value"] == 0


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--models names no model"):
        script.memory_books(str(tmp_path), str(tmp_path / "out.json"), models=())
