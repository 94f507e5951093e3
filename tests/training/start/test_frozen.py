"""Frozen trees: where they lie on a mesh, how they are stored, and what is no tree of the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel import make_mesh
from jaxblt.parallel.rules import replicated
from jaxblt.patching import PatcherConfig
from jaxblt.training.start import frozen as frozen_module
from jaxblt.training.start.frozen import load_frozen
from jaxblt.training.start.setup import init_state, make_setup
from jaxblt.training.state import BASE, ENTROPY, Frozen, content_hash, freeze, freeze_entropy, widen
from jaxblt.training.stored.checkpoint import CheckpointCorrupt, Checkpointer
from jaxblt.training.stored.frozen_store import frozen_dir, write_frozen
from jaxblt.training.stored.integrity import FILE_LIST, StateMismatch
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir
from tests.training.tiny import TinyConfig, tiny_recipe

RECIPE = replace(tiny_recipe(), entropy_model=TinyConfig(dim=8))


def drawn(config: TinyConfig, seed: int = 0) -> Any:
    ids = jnp.zeros((1, 32), jnp.int32)
    return nn.meta.unbox(jax.jit(config.build().init)(jax.random.key(seed), ids))["params"]


@pytest.fixture(scope="module")
def trees() -> dict[str, Frozen]:
    """A base of the recipe's model and an entropy model."""
    return {BASE: freeze(drawn(TinyConfig(), 1), jnp.bfloat16)} | freeze_entropy(drawn(TinyConfig(dim=8)))


@pytest.fixture(scope="module")
def stored(trees: dict[str, Frozen], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    write_frozen(run_dir, trees)
    return run_dir


def named(trees: dict[str, Frozen], recipe: Any = RECIPE) -> Resolved:
    return Resolved(recipe, {name: tree.content_hash for name, tree in trees.items()})


def split_mesh() -> jax.sharding.Mesh:
    return make_mesh(data=1, fsdp=4, tensor=2)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_frozen")
def test_a_base_lies_as_the_parameters_do_and_an_entropy_model_whole(trees: dict[str, Frozen]) -> None:
    mesh = split_mesh()
    with jax.set_mesh(mesh):
        state = init_state(make_setup(RECIPE, mesh, trees), trees)
    base, entropy = state.frozen[BASE].params, state.frozen[ENTROPY].params
    like = jax.tree.map(lambda x: x.sharding, state.params)
    assert jax.tree.map(lambda x: x.sharding, base) == like
    assert base["up"]["kernel"].addressable_shards[0].data.shape == (32 // 4, 64 // 2)
    assert {leaf.sharding for leaf in jax.tree.leaves(entropy)} == {replicated(mesh)}
    jax.tree.map(np.testing.assert_array_equal, state.frozen, trees)
    assert content_hash(base) == trees[BASE].content_hash


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_frozen")
def test_trees_come_back_on_any_mesh_as_they_were_stored(trees: dict[str, Frozen], tmp_path: Path) -> None:
    mesh = split_mesh()
    with jax.set_mesh(mesh):
        placed = init_state(make_setup(RECIPE, mesh, trees), trees).frozen
    write_frozen(tmp_path, placed)
    for onto in (None, mesh, make_mesh(data=1, fsdp=8)):
        found = load_frozen(tmp_path, named(trees), onto)
        jax.tree.map(np.testing.assert_array_equal, found, trees)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
        if onto is mesh:
            assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, placed)


def test_a_tree_keeps_its_dtypes() -> None:
    params = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.bfloat16)}
    assert jax.tree.map(lambda x: x.dtype, freeze(params).params) == {
        "a": jnp.float32,
        "b": jnp.dtype(jnp.bfloat16),
    }


def written(file: Path) -> tuple[int, int, int]:
    """What writing a file again changes; reading it changes the time of access alone."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_frozen")
def test_a_tree_is_written_once_and_outlives_the_steps(trees: dict[str, Frozen], tmp_path: Path) -> None:
    write_frozen(tmp_path, trees)
    before = {file: written(file) for file in frozen_dir(tmp_path).rglob("*") if file.is_file()}
    assert sorted(folder.name for folder in frozen_dir(tmp_path).iterdir()) == sorted(
        named(trees).frozen.values()
    )
    write_frozen(tmp_path, trees)
    with Checkpointer(checkpoint_dir(tmp_path), keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, {"w": jnp.ones(2)})
    assert {file: written(file) for file in before} == before


@pytest.mark.slow(days=28, group="costly")
def test_a_save_that_was_cut_off_is_made_again(trees: dict[str, Frozen], tmp_path: Path) -> None:
    folder = frozen_dir(tmp_path, trees[BASE].content_hash)
    (folder / "0.orbax-checkpoint-tmp-1").mkdir(parents=True)
    write_frozen(tmp_path, {BASE: trees[BASE]})
    assert [entry.name for entry in folder.iterdir()] == ["0"]
    assert load_frozen(tmp_path, named({BASE: trees[BASE]})).keys() == {BASE}


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def another(folder: Path) -> None:
    """A sound tree of the same names and shapes."""
    shutil.rmtree(folder)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(0, freeze_entropy(drawn(TinyConfig(dim=8), 5))[ENTROPY].params)


def cut(folder: Path) -> None:
    (folder / "0" / "state" / "_METADATA").write_text("{}")


def flipped(folder: Path) -> None:
    """A bit of the arrays, where no list of the files tells."""
    (folder / "0" / FILE_LIST).unlink()
    note = folder / "0" / "meta" / "data.json"
    content = json.loads(note.read_text())
    content["fingerprint"]["embedding"] ^= 1
    note.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (missing, FileNotFoundError, "frozen 'entropy' is missing: no checkpoint in .*put back a copy"),
        (another, StateMismatch, "holds another tree than the run's frozen 'entropy': its content hash is"),
        (cut, CheckpointCorrupt, "frozen 'entropy' is damaged, put back a copy of .*_METADATA changed"),
        (flipped, CheckpointCorrupt, "frozen 'entropy' is damaged.*the bits of .*embedding"),
    ],
)
def test_what_is_not_the_tree_of_the_run(trees, stored, tmp_path, spoil, kind, words) -> None:
    shutil.copytree(stored, tmp_path / "run")
    spoil(frozen_dir(tmp_path / "run", trees[ENTROPY].content_hash))
    with pytest.raises(kind, match=words) as caught:
        load_frozen(tmp_path / "run", named(trees))
    assert "\n" not in str(caught.value)


def test_an_entropy_model_of_another_config(trees: dict[str, Frozen], stored: Path) -> None:
    wider = replace(RECIPE, entropy_model=TinyConfig(dim=16))
    with pytest.raises(StateMismatch, match="is not of the model in config"):
        load_frozen(stored, named(trees, wider))


def test_a_widened_tree_has_the_stored_values(trees: dict[str, Frozen]) -> None:
    wide = widen(trees[BASE].params)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}
    jax.tree.map(np.testing.assert_array_equal, wide, trees[BASE].params)


def test_an_entropy_run_whose_model_has_patches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = replace(RECIPE, name="patched", patcher=PatcherConfig(mode="space"), entropy_model=None)
    monkeypatch.setattr(frozen_module, "read_resolved", lambda run_dir: Resolved(patched, {}))
    asked = replace(
        RECIPE, entropy_run="runs/patched", entropy_model=None, patcher=PatcherConfig(), bytes_per_patch=4
    )
    with pytest.raises(
        ValueError, match="entropy_run = 'runs/patched' is a run of 'patched', whose model has patches"
    ):
        frozen_module.resolve(asked, None, make_mesh())
