"""Rows that grow within a run: their lengths by step, the same at every resumption, and bad schedules."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblt.data import DataConfig, make_dataset
from jaxblt.parallel import make_mesh
from jaxblt.training.loop import fit
from jaxblt.training.start.setup import open_data
from tests.training.tiny import Letters, tiny_recipe

SCHEDULE = ((2, 8), (3, 16))
"""Rows of 8 positions in steps 0 and 1, of 16 in step 2, of 32 from step 3 on."""
LENGTHS = (8, 8, 16, 32, 32)


def test_rows_grow_by_the_schedule_and_batches_keep_their_positions() -> None:
    data = make_dataset(DataConfig(seq_len=32, batch_size=4, length_schedule=SCHEDULE), source=Letters())
    shapes = [data.batch(step).inputs.shape for step in range(5)]
    assert shapes == [(4 * 32 // length, length) for length in LENGTHS]
    assert data.settled == 3


def test_rows_of_the_last_stage_are_those_of_a_run_without_a_schedule() -> None:
    config = DataConfig(seq_len=32, batch_size=4, seed=3)
    plain = make_dataset(config, source=Letters())
    staged = make_dataset(
        DataConfig(seq_len=32, batch_size=4, seed=3, length_schedule=SCHEDULE), source=Letters()
    )
    assert staged.num_rows == plain.num_rows
    for step in range(4):
        jax.tree.map(np.testing.assert_array_equal, staged.batch(3 + step), plain.batch(step))


def test_evaluation_has_full_rows() -> None:
    config = DataConfig(seq_len=32, batch_size=4, length_schedule=SCHEDULE)
    data = make_dataset(config, split="validation", mode="eval", source=Letters())
    assert data.row_lengths == (32,)
    assert data.settled == 0


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_trains_through_its_stages_and_resumes_inside_one(tmp_path: Path) -> None:
    options = {"data": {"length_schedule": SCHEDULE}, "steps": 5, "log_every": 1, "eval_every": 0}
    recipe, one_step = tiny_recipe(**options), tiny_recipe(**options, time_limit_s=1e-9)
    whole = fit(recipe, tmp_path / "whole", source=Letters())
    assert [fit(one_step, tmp_path / "parts", source=Letters()).step for _ in range(3)] == [1, 2, 3]
    parts = fit(recipe, tmp_path / "parts", source=Letters())
    assert whole.finished
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, parts.state.params)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]


def test_rows_that_do_not_divide_among_devices_are_refused_before_the_run() -> None:
    recipe = tiny_recipe(data={"length_schedule": ((2, 4),)})
    with pytest.raises(ValueError, match="4"):
        open_data(recipe, make_mesh(seq=8), source=Letters())
