"""The benchmark of levels, tiny: its task by hand, its front, its figures, and what it refuses."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmark.adapters.level_pareto import SYMBOLS, Setting, draw, level_pareto, on_front

TINY = Setting(dim=8, hidden=6, chunk=4, length=12, rows=4, steps=2, seeds=2, test_rows=4)


def test_labels_follow_the_regime_that_was_named_last_enough() -> None:
    tokens, labels, fast = map(np.asarray, jax.jit(partial(draw, rows=16, setting=TINY))(jax.random.key(0)))
    assert fast.any()
    assert not fast.all()
    assert (fast == fast[:, :1]).all()
    for row in range(len(tokens)):
        for t in range(TINY.length):
            marks = tokens[row, t] >= SYMBOLS
            assert marks == (t % TINY.chunk == 0 if fast[row, 0] else t == 0)
            if marks or t < TINY.chunk:
                assert labels[row, t] == -1
                continue
            named = tokens[row, (t // TINY.chunk - 1) * TINY.chunk if fast[row, 0] else 0]
            assert named // SYMBOLS == 1 + fast[row, 0]
            assert labels[row, t] == (tokens[row, t] + named) % SYMBOLS


def test_kinds_of_regimes_change_in_place() -> None:
    setting = replace(TINY, kinds="chunks", length=20)
    tokens, labels, fast = map(
        np.asarray, jax.jit(partial(draw, rows=32, setting=setting))(jax.random.key(0))
    )
    assert (fast[:, 4:] != fast[:, 4:5]).any()
    for row in range(len(tokens)):
        assert tokens[row, 0] // SYMBOLS == 1
        for t in range(4, 20):
            named = tokens[row, t // 4 * 4 - 4]
            assert fast[row, t] == (named // SYMBOLS == 2)
            if t % 4 == 0:
                assert labels[row, t] == -1
                continue
            held = named if fast[row, t] else tokens[row, 0]
            assert labels[row, t] == (tokens[row, t] + held) % SYMBOLS


def test_the_front_has_what_nothing_beats() -> None:
    right_low_high = {"a": (0.9, 1.0, 1.2), "b": (0.9, 1.3, 2.0), "c": (1.0, 3.0, 4.0), "d": (0.8, 1.1, 1.5)}
    arms = {
        name: {"right": r, "rows": {"low": low, "high": high}}
        for name, (r, low, high) in right_low_high.items()
    }
    assert on_front(arms, "rows") == ["a", "c"]


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "pareto.json"
    found = level_pareto(str(out), ("chunk", "priced_gate"), TINY)
    assert json.loads(out.read_text())["arms"] == json.loads(json.dumps(found["arms"]))
    assert all(len(arm["fast"]) == TINY.seeds for arm in found["arms"].values())
    assert set(found["front"]["rows"]) <= {"chunk", "priced_gate"}
    with pytest.raises(
        ValueError, match=r"unknown arms \['no'\], choose of: prefix, chunk, token, length, entropy"
    ):
        level_pareto(str(out), ("no",), TINY)
