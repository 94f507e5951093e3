"""Models of one size on books, with a memory and without: their sizes, and complete figures."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from experiments.benchmark.__main__ import main
from experiments.benchmark.memory import memory_books as script
from experiments.benchmark.memory.paired_books import over_seeds, over_windows
from jaxblt.training.flops import count_params


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_models_are_of_one_size() -> None:
    sizes = {}
    for name, model in script.models_of(script.Settings()).items():
        shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        sizes[name] = count_params(nn.meta.unbox(shapes["params"]))[0]
    assert set(sizes) == {"window", "mag", "mal", "mac", "slots"}
    assert max(sizes.values()) < 1.02 * min(sizes.values()), sizes


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "validation", "test"):
        (tmp_path / part).mkdir()
        for name in ("1", "2")[: 2 if part == "test" else 1]:
            (tmp_path / part / f"{name}.txt").write_bytes(
                b"".join(b"%d%s bottles of beer. " % (n, name.encode()) for n in range(60))
            )
    base = configs.get("books_transformer")
    data = replace(base.data, paths=(str(tmp_path / "*/*.txt"),))
    train = replace(base.train, dtype="float32", log_every=1)
    small = replace(base, data=data, train=train, optimizer=replace(base.optimizer, warmup_steps=1))
    monkeypatch.setitem(configs.RECIPES, "small_books", lambda: small)
    sizes = ["recipe=small_books", "dim=8", "num-layers=2", "window=8", "chunk-size=8", "length=64"]
    options = [f"--settings.{size}" for size in (*sizes, "rows=2", "steps=2", "max-rows=3")]
    lengths = ["--contexts", "32", "128", "--targets", "16"]
    out = tmp_path / "out.json"
    models = ["--models", "mal", "window", "--seeds", "2"]
    main(["memory_books", str(tmp_path / "runs"), "--out", str(out), *models, *lengths, *options])
    found = json.loads(out.read_text())
    runs = {(run["model"], run["seed"]): run for run in found["models"]}
    assert list(runs) == [("mal", 0), ("mal", 1), ("window", 0), ("window", 1)]
    for run in runs.values():
        assert run["step"] == 2
        assert [at["context"] for at in run["contexts"]] == [32, 128]
        assert run["contexts"][0]["gain"]["value"] == 0
        assert len(run["books"]["num_bytes"]) == 2
    assert runs["mal", 0]["books"]["nats"] != runs["mal", 1]["books"]["nats"]
    values = {key: run["contexts"][1]["bits_per_byte"]["value"] for key, run in runs.items()}
    assert [mean["seeds"] for mean in found["mean"]] == [[0, 1], [0, 1]]
    mean = found["mean"][0]["contexts"][1]["bits_per_byte"]["value"]
    assert mean == pytest.approx((values["mal", 0] + values["mal", 1]) / 2)
    assert [gain["seeds"] for gain in found["over_windows"]] == [[0], [1], [0, 1]]
    for seed in (0, 1):
        less = found["over_windows"][seed]["contexts"][1]
        bits = values["window", seed] - values["mal", seed]
        assert less["bits_per_byte"]["value"] == pytest.approx(bits, abs=1e-9)
        assert less["share"]["value"] == pytest.approx(1 - values["mal", seed] / values["window", seed])


def _file(model: str, bits: list[list[float]]) -> dict[str, Any]:
    """A file of runs with one context, of which each seed has so many bits per byte of each book of 100 bytes."""
    runs = []
    for seed, each in enumerate(bits):
        nats = [[100 * math.log(2) * of for of in each]]
        contexts = [{"context": 8, **_bits(np.mean(each)), "gain": _bits(0.0)["bits_per_byte"]}]
        run = {"model": model, "seed": seed, "parameters": 10, "step": 2, "contexts": contexts}
        runs.append({**run, "books": {"num_bytes": [100] * len(each), "nats": nats}})
    return {
        "benchmark": "memory_books",
        "settings": {"num_layers": 1, "dim": 8, "window": 8, "chunk_size": 8},
        "targets": 4,
        "models": runs,
        "mean": over_seeds(runs),
    }


def _bits(value: Any) -> dict[str, Any]:
    return {"bits_per_byte": {"value": float(value), "low": float(value), "high": float(value)}}


def test_gains_are_of_the_same_seed_and_book() -> None:
    """Books differ by more bits than the memory saves, and no interval reaches 0."""
    windows, memory = _file("window", [[1.0, 2.0, 4.0], [2.0, 3.0, 5.0]]), _file("mag", [[0.9, 1.9, 3.6]] * 3)
    first, second, both = over_windows(memory["models"], windows["models"])
    assert [gain["seeds"] for gain in (first, second, both)] == [[0], [1], [0, 1]]
    bits = [gain["contexts"][0]["bits_per_byte"] for gain in (first, second, both)]
    assert [at["value"] for at in bits] == pytest.approx([0.2, 1.2, 0.7])
    assert [bits[0][end] for end in ("low", "high")] == pytest.approx([0.1, 0.4])
    share = first["contexts"][0]["share"]
    assert [share[end] for end in ("value", "low", "high")] == pytest.approx([0.6 / 7, 0.05, 0.1])
    assert over_windows(windows["models"], windows["models"]) == []
    assert over_windows(memory["models"], memory["models"]) == []


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--models names no model"):
        script.memory_books(str(tmp_path), str(tmp_path / "out.json"), models=())


def test_no_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0: it is how many models"):
        script.memory_books(str(tmp_path), str(tmp_path / "out.json"), seeds=0)


def test_more_targets_than_a_context_has_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "models_of", lambda _: pytest.fail("models are made"))
    with pytest.raises(ValueError, match=r"shortest context of \[8, 32\], got 16"):
        script.memory_books(str(tmp_path), str(tmp_path / "out.json"), contexts=(32, 8), targets=16)
