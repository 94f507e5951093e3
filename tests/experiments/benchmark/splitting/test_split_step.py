"""The benchmark of a step whose rows are split."""

import json

import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.splitting import split_step


def test_a_step_over_rows_of_several_devices(monkeypatch, tmp_path):
    """One program is timed on each mesh, with the same rows on each device."""
    taken = {"data=1": 3.0, "fsdp=2": 2.0}
    asked = []

    def measured(recipe, trials):
        asked.append(recipe)
        return {"seconds": {"median": taken["fsdp=2" if recipe.mesh.fsdp == 2 else "data=1"]}}

    monkeypatch.setattr(split_step, "measured", measured)
    out = tmp_path / "split.json"
    main(["split_step", "--out", str(out), "--meshes", *taken, "--rows", "3", "--model", "blt_hyena"])
    meshes = json.loads(out.read_text())["meshes"]
    assert [(found["mesh"], found["efficiency"]) for found in meshes] == [("data=1", 1.0), ("fsdp=2", 1.5)]
    assert [recipe.data.batch_size for recipe in asked] == [3, 6]
    for mesh in ("fsdp", "rows=2", "data=x"):
        with pytest.raises(ValueError, match="is not AXIS=SIZE"):
            split_step.split_step(str(out), meshes=(mesh,))
