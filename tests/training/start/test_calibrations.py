"""Calibrations that outlive a process: read where nothing that they depend on changed."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxblt.patching import PatcherConfig
from jaxblt.training.start import frozen
from jaxblt.training.start.setup import open_data
from tests.training.tiny import Letters, TinyConfig, tiny_recipe


def test_a_calibration_is_read_again_while_nothing_changes(tmp_path, monkeypatch):
    recipe = tiny_recipe(patcher=PatcherConfig(mode="space", block_size=16), compilation_cache=str(tmp_path))
    mesh = recipe.mesh.build(jax.devices()[:1])
    data, made, calibrate = open_data(recipe, mesh, source=Letters()), [], frozen._calibrate

    def count(recipe, *rest):
        made.append(recipe)
        return calibrate(recipe, *rest)

    monkeypatch.setattr(frozen, "_calibrate", count)
    first = frozen.calibrate(recipe, data, mesh, {})
    assert first.capacity is not None
    assert frozen.calibrate(recipe, data, mesh, {}) == first
    longer = replace(recipe, train=replace(recipe.train, steps=99), name="other")
    assert frozen.calibrate(longer, data, mesh, {}) == first
    assert len(made) == 1
    (file,) = (tmp_path / "calibrations").glob("*.json")
    file.write_text(file.read_text()[:-9])
    assert frozen.calibrate(recipe, data, mesh, {}) == first
    assert len(made) == 2
    assert frozen.calibrate(recipe, data, mesh, {}) == first
    assert len(made) == 2
    frozen.calibrate(recipe, open_data(recipe, mesh, source=Letters(), split="all"), mesh, {})
    frozen.calibrate(replace(recipe, patcher=replace(recipe.patcher, min_length=2)), data, mesh, {})
    frozen.calibrate(replace(recipe, entropy_model=TinyConfig(dim=8)), data, mesh, {})
    assert len(made) == 5


def test_calibration_compiles_five_programs(caplog):
    """One each for mean lengths, entropies, gaps, the margin and the slots: operations outside of jit compile too."""
    patcher = PatcherConfig(block_size=16)
    recipe = tiny_recipe(patcher=patcher, bytes_per_patch=3.0, entropy_model=TinyConfig())
    mesh = recipe.mesh.build(jax.devices()[:1])
    data = open_data(recipe, mesh, source=Letters())
    rng = np.random.default_rng(0)
    batches = [
        replace(batch, entropies=rng.gamma(1.3, 1.0, batch.inputs.shape).astype(np.float32))
        for batch in frozen.sample_batches(data, recipe)
    ]
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        found = frozen._calibrate(recipe, batches, mesh, {})
    assert found.threshold is not None
    assert found.margin is not None
    assert found.capacity is not None
    compiled = [record.getMessage().split()[1] for record in caplog.records if "Compiling" in record.msg]
    assert len(compiled) == 5, compiled


@pytest.mark.parametrize("cache", [None, "user"])
def test_nothing_is_written_without_a_cache(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = tiny_recipe(patcher=PatcherConfig(mode="space", block_size=16), compilation_cache=cache)
    mesh = recipe.mesh.build(jax.devices()[:1])
    frozen.calibrate(recipe, open_data(recipe, mesh, source=Letters()), mesh, {})
    assert not list(tmp_path.iterdir())
