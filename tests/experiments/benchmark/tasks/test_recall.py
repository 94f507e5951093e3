"""The recall benchmark: its rows are the task's, and its figures are complete."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.tasks.recall import Settings, over_seeds, recall
from experiments.benchmark.tasks.recall_rows import draw_rows
from experiments.benchmark.tasks.training_budget import CHUNK
from jaxblt.data.tasks import MQAR
from jaxblt.data.vocab import OFFSET
from jaxblt.mixers import StateEngineConfig
from jaxblt.training.flops import count_params

TASK = MQAR(symbols=40, pairs=5, positions=32)
drawn = jax.jit(draw_rows, static_argnums=(0, 2))


def test_rows_ask_for_the_values_of_their_keys() -> None:
    inputs, targets, scored = map(np.asarray, drawn(TASK, jax.random.key(0), 512))
    shown = 2 * TASK.pairs
    assert inputs.shape == targets.shape == (512, TASK.positions)
    assert set(scored.sum(1)) == {TASK.pairs}
    assert not scored[:, :shown].any()
    for row, answers, asked in zip(inputs, targets, scored, strict=True):
        held = dict(zip(row[0:shown:2], row[1:shown:2], strict=True))
        assert len(held) == TASK.pairs
        assert len(set(held.values())) == TASK.pairs
        assert all(OFFSET <= key < OFFSET + 20 <= value < OFFSET + 40 for key, value in held.items())
        assert [held[key] for key in row[asked]] == list(answers[asked])
        assert set(row[asked]) == set(held)
        assert ((np.flatnonzero(asked) - shown) % 2 == 0).all()


def test_gaps_are_drawn_as_the_task_draws_them() -> None:
    """By the mean place of a query over rows; the standard errors of both means are about 0.1."""
    found = np.asarray(drawn(TASK, jax.random.key(1), 512).scored)
    examples = TASK.open("test")
    task = np.stack([examples.example(number).scored for number in range(200)])
    places = np.arange(TASK.positions)
    means = [float((rows * places).sum() / rows.sum()) for rows in (found, task)]
    assert means[0] == pytest.approx(means[1], abs=0.6)


def test_states_may_be_of_any_number_or_in_levels() -> None:
    settings = Settings()
    task = settings.task(16)
    engines = {name: settings.model(name, task).stack.mixer(name) for name in ("T", "T64", "T_levels", "T56")}
    assert all(isinstance(engine, StateEngineConfig) for engine in engines.values())
    counts = {name: (engine.slots, engine.level_sizes) for name, engine in engines.items()}  # pyright: ignore[reportAttributeAccessIssue]
    assert counts == {
        "T": (128, (128,)),
        "T64": (64, (64,)),
        "T_levels": (56, (32, 16, 8)),
        "T56": (56, (56,)),
    }


@pytest.mark.slow(days=28, group="costly")
def test_engines_differ_only_by_the_parameters_of_their_states() -> None:
    """Each state of a head has a column of its route, the column's bias and a bias of its reads."""
    settings, ids = Settings(dim=16, layers=2, heads=2), jnp.zeros((1, 8), jnp.int32)
    modules = {s: settings.model(f"T{s}", settings.task(16)).build() for s in (32, 64, 256)}
    counts = {s: count_params(jax.eval_shape(m.init, jax.random.key(0), ids))[0] for s, m in modules.items()}
    assert counts[64] - counts[32] == 32 * settings.heads * (settings.dim + 2)
    assert counts[256] - counts[64] == 192 * settings.heads * (settings.dim + 2)


@pytest.mark.parametrize(("name", "slots"), [("T_edges", 128), ("T64_edges", 64)])
def test_states_may_have_edges(name: str, slots: int) -> None:
    settings = Settings()
    engine = settings.model(name, settings.task(16)).stack.mixer(name)
    assert isinstance(engine, StateEngineConfig)
    assert (engine.slots, engine.interval_of_edges) == (slots, 64)
    assert (engine.cell, engine.state_attention, engine.state_routes) == ("gru", True, True)


def test_the_interval_is_of_seeds() -> None:
    """That of 0.2, 0.3 and 0.4: t is 4.3027 at two degrees of freedom, the deviation is 0.1."""
    found = over_seeds([0.2, 0.3, 0.4])
    assert found["accuracy"] == pytest.approx(0.3)
    assert found["low"] == pytest.approx(0.3 - 4.3027 * 0.1 / 3**0.5, abs=1e-4)
    assert found["high"] == pytest.approx(0.3 + 4.3027 * 0.1 / 3**0.5, abs=1e-4)
    assert over_seeds([0.9, 1.0])["high"] == 1.0
    assert over_seeds([0.5]) == {"accuracy": 0.5, "low": None, "high": None}


def test_what_trains_no_model_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "recall.json")
    with pytest.raises(ValueError, match=r"nothing to train: name pairs and mixers, got \(\) and \('A',\)"):
        recall(out, pairs=(), mixers=("A",))
    with pytest.raises(ValueError, match=r"nothing to train: .* got \(16,\) and \(\)"):
        recall(out, pairs=(16,), mixers=())
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        recall(out, pairs=(16,), mixers=("A",), seeds=0)
    with pytest.raises(ValueError, match=r"must differ among themselves, got \(4, 4\) and \('A',\)"):
        recall(out, pairs=(4, 4), mixers=("A",))


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_recall_figures(tmp_path: Path) -> None:
    settings = Settings(symbols=16, dim=8, layers=2, heads=1, tokens=128, steps=CHUNK, dtype="float32")
    out = tmp_path / "recall.json"
    recall(str(out), pairs=(2,), mixers=("recurrence",), settings=settings)
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert run["mixer"] == "recurrence"
    assert run["steps"] == CHUNK
    assert 0 <= run["accuracy"] <= 1
    assert len(run["accuracy_by_chunk"]) == 1
    assert run["parameters"] > settings.dim * settings.symbols
    assert 0 < found["majority"]["2"] < 0.5
    assert found["mean"] == [
        {"mixer": "recurrence", "pairs": 2, "accuracy": run["accuracy"], "low": None, "high": None}
    ]
