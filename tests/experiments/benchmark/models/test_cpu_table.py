"""The benchmark of a train step on a CPU: what it times, and the figures that it leaves."""

import json
import subprocess
from pathlib import Path

import jax
import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.models import cpu_row, cpu_table
from jaxblt.training.loop import fit
from tests.training.tiny import Letters, TinyConfig, patched_recipe, tiny_recipe

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def entropy_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), steps=6, eval_every=0), run_dir, source=Letters())
    return str(run_dir)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_row_of_the_cpu_table(entropy_run):
    found = cpu_row.measure_step(patched_recipe(entropy_run), source=Letters())
    assert (found["seq_len"], found["batch_size"]) == (32, 8)
    seconds = found["step_seconds"]
    assert seconds["trials"] == 20
    assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
    assert found["bytes_per_second"] == pytest.approx(32 * 8 / seconds["median"])
    assert found["peak_resident_bytes"] >= found["resident_bytes_before"] > 2**26


def test_the_table_has_a_row_a_length_and_says_where_it_was_measured(tmp_path, monkeypatch):
    asked = []

    really = subprocess.run

    def answer(command, **options):
        if command[0] == "git":
            return really(command, **options)
        assert options["env"]["JAX_PLATFORMS"] == "cpu"
        asked.append(command[2:])
        said = f"some log\n{command[-1]}\n" if "cpu_row" in command[2] else ""
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(cpu_table.subprocess, "run", answer)
    out = tmp_path / "cpu.json"
    main(["cpu_table", "--out", str(out), "--lengths", "1024", "4096", "--batch-bytes", "8192"])
    assert asked[0][:2] == ["experiments.train", "demo_entropy"]
    monkeypatch.undo()
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["seq_len"], row["batch_size"]) for row in found["rows"]] == [(1024, 8), (4096, 2)]
    assert found["cpu"]
    assert found["cpus_usable"] >= 1
    assert found["versions"]["jax"] == jax.__version__


def test_lengths_must_divide_the_bytes_of_a_step():
    with pytest.raises(ValueError, match=r"batch_bytes = 16384 is no multiple of the lengths \[3000\]"):
        main(["cpu_table", "--out", "never.json", "--lengths", "1024", "3000"])


@pytest.mark.slow(days=28, group="costly")
def test_a_row_that_fails_says_why():
    with pytest.raises(RuntimeError, match="holds no run"):
        cpu_table.row(seq_len=1024, batch_size=1, entropy_run="no/such/run", trials=20)
