"""The benchmarks of a train step: what they time, and the figures they leave."""

import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.benchmark import _cpu_row, _split_step, cpu_table, patching_share, split_step
from experiments.benchmark.__main__ import main
from experiments.benchmark._step import prepare
from jaxblt.parallel import MeshConfig
from jaxblt.training.flops import matmul_flops
from jaxblt.training.loop import fit
from tests.training.tiny import Letters, TinyConfig, patched_recipe, tiny_recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def entropy_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), steps=6, eval_every=0), run_dir, source=Letters())
    return str(run_dir)


@pytest.fixture(scope="module")
def ready(entropy_run):
    mesh = MeshConfig(data=1).build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        return prepare(patched_recipe(entropy_run), mesh, Letters())


def test_given_entropies_spare_the_entropy_model_and_nothing_else(ready):
    online, given = patching_share.cases(ready)
    assert online.fn is given.fn
    flops = [matmul_flops(case.fn, *case.args) for case in (online, given)]
    rows, length = ready.batch.inputs.shape
    entropy_model = ready.setup.task.entropy_model
    params = jax.eval_shape(entropy_model.init, jax.random.key(0), ready.batch.inputs)
    ids = jax.ShapeDtypeStruct((rows, length), np.int32)
    np.testing.assert_allclose(flops[0] - flops[1], matmul_flops(entropy_model.apply, params, ids))


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_share_of_a_step(ready):
    found = patching_share.share(ready)
    assert found["method"] == "slope"
    expected = 1 - found["given_seconds"]["median"] / found["online_seconds"]["median"]
    assert found["share"] == pytest.approx(expected)
    assert found["share_low"] <= found["share"] <= found["share_high"] < 1
    losses = list(found["losses"].values())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    json.dumps(found)


def test_a_recipe_without_an_entropy_model_is_refused():
    mesh = MeshConfig(data=1).build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        plain = prepare(tiny_recipe(), mesh, Letters())
    with pytest.raises(ValueError, match="'tiny' asks no entropy model"):
        patching_share.cases(plain)


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_a_row_of_the_cpu_table(entropy_run):
    found = _cpu_row.measure_step(patched_recipe(entropy_run), source=Letters())
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
        said = f"some log\n{command[-1]}\n" if "_cpu_row" in command[2] else ""
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


def test_a_row_that_fails_says_why():
    with pytest.raises(RuntimeError, match="holds no run"):
        cpu_table.row(seq_len=1024, batch_size=1, entropy_run="no/such/run", trials=20)


def test_a_step_over_rows_of_several_devices(monkeypatch, tmp_path):
    """One program is timed on each mesh, with the same rows on each device."""
    taken = {"data=1": 3.0, "fsdp=2": 2.0}
    asked = []

    def measured(recipe, trials):
        asked.append(recipe)
        return {"seconds": {"median": taken["fsdp=2" if recipe.mesh.fsdp == 2 else "data=1"]}}

    monkeypatch.setattr(_split_step, "measured", measured)
    out = tmp_path / "split.json"
    main(["split_step", "--out", str(out), "--meshes", *taken, "--rows", "3", "--model", "blt_hyena"])
    meshes = json.loads(out.read_text())["meshes"]
    assert [(found["mesh"], found["efficiency"]) for found in meshes] == [("data=1", 1.0), ("fsdp=2", 1.5)]
    assert [recipe.data.batch_size for recipe in asked] == [3, 6]
    for mesh in ("fsdp", "rows=2", "data=x"):
        with pytest.raises(ValueError, match="expected axes of"):
            split_step.read_mesh(mesh)
