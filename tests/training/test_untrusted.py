"""A run folder that nobody vouches for is refused in one line, before it hangs or fills the memory."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import init_params, make_task
from jaxblt.training.state import BASE, Frozen, freeze, freeze_entropy
from jaxblt.training.stored import integrity
from jaxblt.training.stored.checkpoint import CheckpointCorrupt, Checkpointer, restore
from jaxblt.training.stored.frozen_store import frozen_dir, write_frozen
from jaxblt.training.stored.integrity import FILE_LIST
from jaxblt.training.stored.resolved import Resolved, checkpoint_dir, read_resolved, write_resolved
from tests.training.tiny import TinyConfig, tiny_recipe

STACK = StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8, scan=False)
RECIPE = tiny_recipe(model=ByteLMConfig(stack=STACK))
PATCHED = tiny_recipe(
    model=TinyConfig(dim=4),
    patcher=PatcherConfig(mode="entropy", threshold=1.0, block_size=16, capacity=16),
    entropy_model=ByteLMConfig(stack=STACK),
)


def ones(recipe: Recipe) -> Any:
    """Parameters of the recipe's model."""
    shapes = nn.meta.unbox(jax.eval_shape(lambda: init_params(make_task(recipe), recipe.data, 0)))
    return jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)


def write_run(run_dir: Path, recipe: Recipe, frozen: dict[str, Frozen]) -> Path:
    """The folder of a run that was never trained."""
    write_resolved(run_dir, Resolved(recipe, {name: tree.content_hash for name, tree in frozen.items()}))
    write_frozen(run_dir, frozen)
    with Checkpointer(checkpoint_dir(run_dir)) as checkpoints:
        checkpoints.save(1, {"params": ones(recipe)})
    return run_dir


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one layer."""
    return write_run(tmp_path_factory.mktemp("sound"), RECIPE, {})


@pytest.fixture(scope="module")
def sound_patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an entropy model of one layer."""
    return write_run(tmp_path_factory.mktemp("patched"), PATCHED, freeze_entropy(ones(RECIPE)))


@pytest.fixture
def patched(sound_patched: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(sound_patched, tmp_path / "run", symlinks=True)


@pytest.fixture
def run_dir(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(sound, tmp_path / "run", symlinks=True)


def refused(run_dir: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        jaxblt.load(run_dir)
    assert len(str(caught.value)) < 1000


def rewrite(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_sound_folder_loads(sound: Path) -> None:
    run = jaxblt.load(sound)
    assert run.recipe == RECIPE
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(run.params))


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.unlink(missing_ok=True)
    other = path.parents[3] / "other"
    other.write_text("{}")
    path.symlink_to(other)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", FILE_LIST, "meta/data.json", "state/new"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(fifo, "not a regular file but p"), (endless, "leads out of"), (elsewhere, "leads out of")],
)
def test_what_is_no_file_of_the_checkpoint_is_never_opened(run_dir: Path, spoil, words, file, listed) -> None:
    step = checkpoint_dir(run_dir) / "1"
    if not listed:
        (step / FILE_LIST).unlink()
    spoil(step / file)
    refused(run_dir, ValueError, words)


@pytest.mark.parametrize(
    ("name", "words"),
    [("/dev/zero", "outside the folder"), ("../../config.json", "outside the folder"), ("state", "changed")],
)
def test_the_list_names_files_of_the_folder_alone(run_dir: Path, name: str, words: str) -> None:
    rewrite(checkpoint_dir(run_dir) / "1" / FILE_LIST, lambda listing: listing.update({name: [5, 5]}))
    refused(run_dir, CheckpointCorrupt, words)


@pytest.mark.parametrize("text", ["[1]", '{"state/_METADATA": 3}', '{"": [1]}', "[" * 100_000, "\xff"])
def test_a_list_that_is_none(run_dir: Path, text: str) -> None:
    (checkpoint_dir(run_dir) / "1" / FILE_LIST).write_text(text, encoding="latin-1")
    refused(run_dir, CheckpointCorrupt, "files.json")


def test_a_file_of_another_size_is_not_read(run_dir: Path) -> None:
    step = checkpoint_dir(run_dir) / "1"
    arrays = next((step / "state" / "ocdbt.process_0" / "d").iterdir())
    os.truncate(arrays, 1 << 40)  # sparse: a terabyte that takes no room
    refused(run_dir, CheckpointCorrupt, r"changed: \[bytes, crc\] \[1099511627776\]")
    os.truncate(step / "meta" / "data.json", 1 << 40)
    refused(run_dir, ValueError, "data.json has 1099511627776 bytes, expected at most")


def test_checkpoints_that_lie_elsewhere(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of the user's own is followed."""
    folder = checkpoint_dir(run_dir)
    folder.rename(run_dir.parent / "moved")
    folder.symlink_to(run_dir.parent / "moved")
    assert jaxblt.load(run_dir).step == 1
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(run_dir, ValueError, "leads out of")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (fifo, "not a regular file"),
        (endless, "leads out of"),
        (lambda file: os.truncate(file, 1 << 40), "1099511627776 bytes, expected at most 1048576"),
        (lambda file: file.write_text("[" * 100_000), "is not JSON"),
        (lambda file: file.write_bytes(b"\xff\x00"), "is not JSON"),
    ],
)
def test_a_config_that_is_none(run_dir: Path, spoil, words) -> None:
    spoil(run_dir / "config.json")
    refused(run_dir, ValueError, f"config.json.*{words}")


LAYER = 1_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": LAYER}, "not of the model"),
        ({"num_layers": LAYER, "scan": True}, "not of the model"),
        ({"num_layers": LAYER, "pattern": "R" * 500}, "not of the model"),
        ({"dim": LAYER}, "not of the model"),
        ({"mlp_dim": LAYER**3}, r"recipe.model.stack.mlp_dim is 10+, expected a number of at most"),
        ({"mlp_dim": 10**30}, "recipe.model.stack.mlp_dim is a whole number of 100 bits"),
        ({"dim": "8"}, "recipe.model.stack.dim is '8', expected int"),
        ({"pattern": "A", "dim": 7}, "cannot be built|not of the model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_model_larger_than_the_checkpoint_is_neither_traced_nor_allocated(run_dir, change, words) -> None:
    rewrite(run_dir / "config.json", lambda content: content["recipe"]["model"]["stack"].update(change))
    refused(run_dir, ValueError, words)


def test_arrays_larger_than_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.zeros((1 << 20,), np.float32)})  # compressed to next to nothing
    monkeypatch.setattr(integrity, "EXPANDED_FREELY", 1 << 20)
    with pytest.raises(CheckpointCorrupt, match="describes arrays of 4194304 bytes"):
        restore(tmp_path, {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32)})


def test_names_of_other_files_are_not_followed(run_dir: Path) -> None:
    fifo(run_dir / "waits")
    waits = str(run_dir / "waits")
    recipe = replace(RECIPE, data=replace(RECIPE.data, paths=(waits,), entropies=waits), init_from=waits)
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16)
    patched = replace(recipe, model=BLTConfig(), patcher=patcher, entropy_run=waits)
    write_resolved(run_dir, Resolved(recipe, {}))
    assert jaxblt.load(run_dir).recipe.init_from == waits
    write_resolved(run_dir, Resolved(patched, {}))
    assert read_resolved(run_dir).recipe.entropy_run == waits


def test_a_recipe_without_its_parts(run_dir: Path) -> None:
    named = {"entropy": "0" * 64}
    write_resolved(run_dir, Resolved(RECIPE, named))
    refused(run_dir, ValueError, "recipe.entropy_model is a NoneType")
    write_resolved(run_dir, Resolved(replace(RECIPE, entropy_model=TinyConfig()), named))
    refused(run_dir, ValueError, "no patcher with a threshold")


def tree_of(run_dir: Path) -> Path:
    (tree,) = frozen_dir(run_dir).iterdir()
    return tree


@pytest.mark.slow(days=28, group="costly", turn="training/test_untrusted")
def test_a_sound_folder_with_an_entropy_model_loads(sound_patched: Path) -> None:
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(jaxblt.load(sound_patched).entropy_params))


@pytest.mark.parametrize("file", ["_CHECKPOINT_METADATA", FILE_LIST])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [(fifo, "not a regular file but p"), (endless, "leads out of"), (elsewhere, "leads out of")],
)
def test_what_is_no_file_of_a_frozen_tree_is_never_opened(patched: Path, spoil, words, file) -> None:
    spoil(tree_of(patched) / "0" / file)
    refused(patched, ValueError, words)


@pytest.mark.parametrize("find", [frozen_dir, tree_of])
def test_frozen_trees_that_lie_elsewhere(patched: Path, find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    folder = find(patched)
    folder.rename(patched.parent / "moved")
    folder.symlink_to(patched.parent / "moved")
    refused(patched, ValueError, "leads out of")


def test_an_entropy_model_larger_than_its_tree_is_neither_traced_nor_allocated(patched: Path) -> None:
    larger = {"num_layers": LAYER, "scan": True}
    rewrite(patched / "config.json", lambda c: c["recipe"]["entropy_model"]["stack"].update(larger))
    refused(patched, ValueError, "not of the model")


@pytest.mark.slow(days=28, group="costly", turn="training/test_untrusted")
def test_another_tree_under_the_name_of_the_hash(patched: Path) -> None:
    """With sizes and sums that fit it."""
    folder = tree_of(patched)
    shutil.rmtree(folder)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(0, freeze(jax.tree.map(lambda x: 2 * x, ones(RECIPE)), jnp.bfloat16).params)
    refused(patched, ValueError, "holds another tree than the run's frozen 'entropy': its content hash is")


@pytest.mark.slow(days=28, group="costly", turn="training/test_untrusted")
def test_a_frozen_tree_larger_than_its_files(patched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = freeze({"w": np.zeros((1 << 20,), np.float32)})
    write_frozen(patched, {BASE: tree})
    rewrite(patched / "config.json", lambda c: c["frozen"].update({BASE: tree.content_hash}))
    assert jaxblt.load(patched).frozen[BASE].content_hash == tree.content_hash
    monkeypatch.setattr(integrity, "EXPANDED_FREELY", 1 << 20)
    refused(patched, CheckpointCorrupt, "frozen 'base' is damaged.*describes arrays of 4194304 bytes")
