"""The benchmark of lengths: rows are the tasks', and its figures are complete."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmark.tasks import length_generalisation as benchmark
from experiments.benchmark.tasks.small_models import Rows, scores_on
from experiments.benchmark.tasks.training_budget import CHUNK

TINY = benchmark.Settings(rows=2, dim=8, steps=CHUNK, symbols=2, bits=5, long_bits=9, test_rows=4)


def test_rows_are_the_examples_of_the_task() -> None:
    trained, tested = TINY.tasks("parity")
    first, second = list(benchmark.chunks_of(trained, benchmark.Settings(rows=2, steps=2 * CHUNK, bits=5), 3))
    assert first.inputs.shape == (CHUNK, 2, trained.length)
    example = trained.open("train", seed=3).example(2 * CHUNK)
    for field, values in zip(second, example, strict=True):
        row = np.asarray(field)[0, 0]
        assert (row[: len(values)] == values).all()
        assert not row[len(values) :].any()
    longer = benchmark.draw(tested, 4, split="test")
    assert np.asarray(longer.scored).sum(1).tolist() == [TINY.long_bits] * 4


def test_a_row_with_one_wrong_answer_is_not_exact() -> None:
    class Echo:
        """Predicts what it reads."""

        def apply(self, params: object, ids: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.one_hot(ids, 4), None

    inputs = np.asarray([[0, 1, 2, 3], [0, 1, 2, 3]])
    targets = np.asarray([[3, 1, 2, 3], [3, 1, 0, 3]])
    scored = np.asarray([[False, True, True, True], [False, True, True, False]])
    accuracy, exact = scores_on(Echo(), {}, Rows(*map(jax.numpy.asarray, (inputs, targets, scored))))
    assert float(accuracy) == pytest.approx(4 / 5)
    assert float(exact) == 0.5


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("name", ["copy", "parity"])
def test_length_figures(name: benchmark.Name, tmp_path: Path) -> None:
    out = tmp_path / "lengths.json"
    benchmark.length_generalisation(str(out), tasks=(name,), seeds=1, settings=TINY)
    (run,) = json.loads(out.read_text())["runs"]
    assert (run["task"], run["seed"], run["steps"]) == (name, 0, CHUNK)
    trained, tested = TINY.tasks(name)
    found = run["lengths"]
    assert [found[where]["positions"] for where in ("trained", "longer")] == [trained.length, tested.length]
    assert all(0 <= found[where][score] <= 1 for where in found for score in ("accuracy", "exact"))
    assert len(run["accuracy_by_chunk"]) == 1


def test_seeds_and_lengths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        benchmark.length_generalisation(str(tmp_path / "x.json"), seeds=0)
    with pytest.raises(ValueError, match=r"--tasks must name copy, parity or both, got \(\)"):
        benchmark.length_generalisation(str(tmp_path / "x.json"), tasks=())
    with pytest.raises(ValueError, match=r"got \('parities',\)"):
        benchmark.length_generalisation(str(tmp_path / "x.json"), tasks=("parities",))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="long_bits must be at least 40"):
        benchmark.Settings(long_bits=39)
