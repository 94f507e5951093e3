"""A run packed for the box: an archive by its name and hash, weights in bfloat16, and the data of its recipe."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from experiments.box import box
from jaxblt import boxed, recipes
from jaxblt.interchange import read_run, write_run
from jaxblt.models import ByteLMConfig, StackConfig
from tests.answers.runs import HEADS, make_run
from tests.mixer_table import table

SMALL = ByteLMConfig(
    stack=StackConfig(dim=16, num_layers=1, pattern="A", mlp_dim=24, mixers=table(attention=HEADS))
)


def test_a_packed_run_is_unpacked_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(make_run(SMALL), step=7)
    write_run(run, tmp_path / "run.safetensors")
    read_run(tmp_path / "run.safetensors", tmp_path / "run")
    found = box(str(tmp_path / "run"), "english", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(boxed, "HERE", tmp_path)
    monkeypatch.setattr(boxed, "boxed", lambda: {"english": {"sha256": found}})
    read = jaxblt.load("english")
    assert (read.recipe.name, read.recipe.data, read.step) == ("english", recipes.get("english").data, 7)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), run.params)
    jax.tree.map(np.testing.assert_array_equal, read.params, rounded)
    with pytest.raises(FileExistsError, match=r"english\.zip"):
        box(str(tmp_path / "run"), "english", tmp_path)
