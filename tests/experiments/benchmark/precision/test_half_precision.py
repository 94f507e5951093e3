"""Recipes in several dtypes, and gaps over seeds."""

import pytest

from experiments.benchmark.precision import half_precision as module
from experiments.benchmark.precision.half_precision import Settings, half_precision


def test_dtypes_share_seeds_and_rows_and_fp16_has_a_moving_scale() -> None:
    settings = Settings(steps=40, eval_batches=2)
    whole, half = (settings.recipe(dtype, seed=1) for dtype in ("float32", "float16"))
    assert (half.data, half.model, half.optimizer) == (whole.data, whole.model, whole.optimizer)
    assert (half.train.seed, half.train.dtype, half.train.loss_scale.every) == (1, "float16", 20)
    assert (half.train.eval_every, half.train.eval_batches, half.data.seed) == (40, 2, 1)


def test_gaps_are_to_the_first_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    bits, saved = iter([2.0, 2.1, 2.0, 2.3]), []
    monkeypatch.setattr(module, "train", lambda recipe, folder: {"bits_per_byte": next(bits), "skipped": 0})
    monkeypatch.setattr("experiments.benchmark.figures.saved.save", lambda *given: saved.append(given))
    found = half_precision("out.json", dtypes=("float32", "float16"), seeds=2)
    assert found["gap"]["float16"]["value"] == pytest.approx(0.2)
    assert found["gap"]["float16"]["low"] < 0.1 < 0.3 < found["gap"]["float16"]["high"]
    assert len(saved) == 2
    with pytest.raises(ValueError, match="compares two dtypes or more, and takes seeds, got"):
        half_precision("out.json", dtypes=("float16",))
