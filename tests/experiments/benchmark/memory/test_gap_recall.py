"""The benchmark of recall over gaps: its rows, its models without reads, equal sizes, and complete figures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.figures.intervals import wilson
from experiments.benchmark.memory.gap_models import equal_models, held, model_of
from experiments.benchmark.memory.gap_recall import gap_recall
from experiments.benchmark.memory.gap_rows import draw_gaps, draw_rows
from experiments.benchmark.memory.gap_settings import MEMORIES, STEPS_A_CALL, Settings
from experiments.benchmark.memory.gap_training import Programs, compile_model, train
from jaxblt.data.tasks import GapRecall
from jaxblt.data.vocab import OFFSET
from jaxblt.training.flops import count_params
from tests.parameters import drawn

RESULTS = Path(__file__).parents[4] / "experiments" / "results"
TASK = GapRecall(symbols=10, fillers=4, pairs=3)
TINY = Settings(
    symbols=4,
    fillers=2,
    pairs=2,
    dim=8,
    layers=1,
    heads=1,
    window=4,
    chunk=4,
    shortest=1,
    trained=(1,),
    tested=(1, 2),
    tokens=32,
    steps=STEPS_A_CALL,
    test_rows=4,
)


def test_rows_ask_for_the_values_of_their_keys() -> None:
    gaps = np.random.default_rng(0).integers(1, 30, 64).astype(np.int32)
    drawn = jax.jit(draw_rows, static_argnums=(0, 3))(TASK, jax.random.key(0), gaps, 40)
    inputs, targets, scored = map(np.asarray, drawn)
    for row, answers, asked, gap in zip(inputs - OFFSET, targets - OFFSET, scored, gaps, strict=True):
        pairs = dict(zip(row[0:6:2], row[1:6:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == TASK.pairs
        assert all(0 <= key < 10 <= value < 20 for key, value in pairs.items())
        assert list(np.flatnonzero(asked)) == [6 + gap, 7 + gap, 8 + gap]
        assert set(row[asked]) == set(pairs)
        assert [pairs[key] for key in row[asked]] == list(answers[asked])
        rest = np.delete(row, [*range(6), *np.flatnonzero(asked)])
        assert ((rest >= 20) & (rest < 24)).all()


def test_gaps_reach_from_the_shortest_to_the_longest() -> None:
    gaps = np.asarray(draw_gaps(jax.random.key(0), 4000, 2, 100))
    assert (gaps.min(), gaps.max()) == (2, 100)
    assert np.mean(gaps <= 10) == pytest.approx(np.log(11 / 2) / np.log(101 / 2), abs=0.03)


def test_wilson_intervals() -> None:
    """Those of 5 and 0 of 10 in Newcombe, Statistics in Medicine 17 (1998), table I's method 3, to three digits."""
    assert wilson(5, 10) == pytest.approx((0.237, 0.763), abs=5e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.278), abs=5e-4)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_models_are_of_one_size() -> None:
    settings, sizes = Settings(layers=1), []
    for model in equal_models(("mac", "hyena", "attention"), settings, settings.task.vocab_size).values():
        shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        sizes.append(count_params(nn.meta.unbox(shapes["params"]))[0])
    assert max(sizes) < 1.02 * min(sizes)


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("name", MEMORIES)
def test_off_is_blind_beyond_the_windows(name: str) -> None:
    """A token beyond the reach of windows changes the last logits only if reads are not held at zero."""
    model = model_of(name, TINY, TINY.task.vocab_size, 8)
    module, ids = model.build(), jnp.arange(16, dtype=jnp.int32)[None] % 8 + OFFSET
    params = drawn(module, ids)["params"]
    last = jax.jit(lambda params, ids: module.apply({"params": params}, ids)[0][0, -1])

    def moves(mask: Any) -> float:
        used = jax.tree.map(jnp.multiply, params, mask)
        return float(jnp.abs(last(used, ids) - last(used, ids.at[0, 1].add(1))).max())

    assert moves(held(name, params, off=True)) == 0
    assert moves(held(name, params, off=False)) > 1e-4


def test_memories_that_are_off_and_windows_are_at_chance_in_every_published_file() -> None:
    """Chance lies within the 95 % interval over all seeds at each gap; and below it for what sees beyond windows."""
    seen = {False: 0, True: 0}
    for file in sorted(RESULTS.glob("gap_recall*.json")):
        found = json.loads(file.read_text())
        for model in found["mean"]:
            off = model["model"].endswith(("_off", "window"))
            for gap in model["gaps"]:
                below, above = found["chance"] < gap["low"], found["chance"] > gap["high"]
                assert (below, above) == (not off, False), (
                    f"{file.name}: {model['model']} at {gap['multiple']} x"
                )
                seen[off] += 1
    assert min(seen.values()) > 9


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_figures(tmp_path: Path) -> None:
    out = tmp_path / "gap_recall.json"
    gap_recall(str(out), models=("mag",), seeds=1, settings=replace(TINY, test_rows=128))
    found = json.loads(out.read_text())
    assert all(gap["low"] <= 0.25 <= gap["high"] for gap in found["runs"][1]["gaps"])
    assert [run["model"] for run in found["runs"]] == ["mag", "mag_off"]
    assert [run["parameters"] for run in found["mean"]] == [found["runs"][0]["parameters"]] * 2
    assert found["chance"] == 0.25
    for run in found["runs"]:
        assert [gap["gap"] for gap in run["gaps"]] == [3, 6]
        assert all(gap["low"] <= gap["accuracy"] <= gap["high"] for gap in run["gaps"])
        assert all(0 < gap["bits"] < 10 for gap in run["gaps"])
        assert run["steps"] == STEPS_A_CALL
        assert run["tokens_per_second"][0] > 0
        assert len(run["accuracy_by_call"]) == 1


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_full_attention_is_a_ceiling() -> None:
    """At gaps of training and at four times them; with rotary phases and without a convolution: 49 and 25 %."""
    sizes: Any = {"symbols": 8, "fillers": 4, "pairs": 4, "dim": 32, "window": 8, "chunk": 8, "test_rows": 64}
    settings = Settings(**sizes, trained=(2,), tested=(2, 8), tokens=2048, steps=600)
    settings = replace(settings, learning_rate=settings.rate_of("attention"))
    programs = compile_model(model_of("attention", settings, settings.task.vocab_size, 64), settings, 1)
    (run,) = train("attention", programs, settings, [(False, 0)], None)
    assert min(gap["accuracy"] for gap in run["gaps"]) > 0.95


@pytest.mark.slow(days=28, group="costly")
def test_a_model_out_of_time_is_tested_as_it_is() -> None:
    settings = replace(TINY, trained=(1, 2), steps=4 * STEPS_A_CALL)

    def stage(carried: Any, *_: Any) -> tuple[Any, Any]:
        return carried, jnp.full((2, STEPS_A_CALL), 0.5)

    def score(*_: Any) -> tuple[Any, Any]:
        return jnp.asarray([1.0, 2.0]) * jnp.log(2), jnp.asarray([8, 4])

    shapes = {"embedding": jnp.zeros(3)}
    start = lambda *_: (shapes, None)  # noqa: E731
    programs = Programs(shapes, start, (stage, stage), score, rows=4, parameters=3, seconds=1.0)
    kinds, found = [(False, 0), (False, 1)], {}
    for limit in (None, 1e-9):
        found[limit] = train("window", programs, settings, kinds, limit)
    assert [len(run["accuracy_by_call"]) for run in found[None] + found[1e-9]] == [4, 4, 1, 1]
    assert [run["steps"] for run in found[1e-9]] == [STEPS_A_CALL] * 2
    assert found[1e-9][0]["seconds"][1] == 0
    assert found[1e-9][0]["tokens_per_second"][1] is None
    for run, bits, share in zip(found[1e-9], (1, 2), (1, 0.5), strict=True):
        assert [gap["bits"] for gap in run["gaps"]] == pytest.approx([bits] * 2)
        assert [gap["accuracy"] for gap in run["gaps"]] == [share] * 2


@pytest.mark.parametrize(
    ("models", "change", "message"),
    [
        (
            ("mag", "mal"),
            {"chunk": 512},
            "attention of mag with chunks of 512 sees 1,022 symbols back, and the shortest gap that is tested has 120",
        ),
        (
            ("mal",),
            {"chunk": 2048},
            "first question of the shortest row stands at symbol 47, and mal remembers",
        ),
        (
            ("attention",),
            {"layers": 1},
            "attention is layers of hyena_short and attention in turn: raise --settings.layers to 2",
        ),
    ],
)
def test_gaps_that_ask_no_memory_are_refused(
    models: tuple[str, ...], change: Any, message: str, tmp_path: Path
) -> None:
    """Their figures were those of attention, or of chance, under a memory's name."""
    with pytest.raises(ValueError, match=message):
        gap_recall(str(tmp_path / "no"), models=models, settings=replace(Settings(), **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 75}, "steps must be a multiple of 50 for each of 1 stages, got 75"),
        ({"shortest": 4}, "shortest must be at most 1 x 3, the longest gap of a stage, got 4"),
        ({"tested": ()}, "must be multiples of the reach from 1"),
    ],
)
def test_bad_settings_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("models", "message"),
    [(("lstm",), r"--models names \['lstm'\]"), ((), "--models names no model")],
)
def test_models_that_are_not_there_are_refused(models: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gap_recall("unused.json", models=models)
