"""Recipes with rows that grow, and gaps over seeds."""

import pytest

from experiments.benchmark.tasks import progressive as module
from experiments.benchmark.tasks.progressive import growing, of_one_length, progressive
from jaxblt.data import make_dataset


def test_both_recipes_read_equal_bytes_a_step() -> None:
    fixed = of_one_length("phage", 40, seed=1)
    grows = growing(fixed, (0.25, 0.5), (8, 2))
    assert grows.data.length_schedule == ((10, 64), (20, 256))
    rows = [[make_dataset(one.data).batch(step).inputs for step in (0, 10, 20)] for one in (fixed, grows)]
    assert [x.size for x in rows[0]] == [x.size for x in rows[1]] == [8 * 512] * 3
    assert [x.shape[1] for x in rows[1]] == [64, 256, 512]
    assert (fixed.train.seed, grows.train.eval_every) == (1, 40)


def test_gaps_are_of_pairs_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, saved = iter([2.0, 1.9, 2.0, 1.95]), []
    monkeypatch.setattr(module, "train", lambda recipe: next(scores))
    monkeypatch.setattr("experiments.benchmark.figures.saved.save", lambda *given: saved.append(given))
    found = progressive("out.json", steps=40, seeds=2)
    assert [run["gap"] for run in found["runs"]] == pytest.approx([-0.1, -0.05])
    assert found["gap"]["value"] == pytest.approx(-0.075)
    assert found["gap"]["low"] < -0.1 < 0 < found["gap"]["high"]
    assert len(saved) == 2
    with pytest.raises(ValueError, match="a divisor for each share and at least one seed"):
        progressive("out.json", shares=(0.5,))
