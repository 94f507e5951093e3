"""Going on at a greater length: a byte-patched modal Hyena with rotary attention, from another run's parameters."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import configs
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.training.evaluate import Validation
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.begin import begin
from jaxblt.training.start.setup import open_data
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.resolved import Resolved, inherit, write_resolved
from tests.mixer_table import table
from tests.training.test_loop import losses
from tests.training.tiny import Letters, tiny_recipe

ONE = jax.devices()[:1]


def blt(rope_scale=1.0):
    heads = AttentionConfig(dim=16, num_heads=2, packed=False)
    local = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=0, mixers=table(attention=heads, window=8))
    latent = StackConfig(
        dim=16,
        num_layers=2,
        pattern="HA",
        mlp_dim=24,
        mixers={
            "H": HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=32.0), packed=False),
            "A": replace(heads, rope_scale=rope_scale),
        },
    )
    return BLTConfig(encoder=local, latent=latent, decoder=local, hash=None, bridge_heads=2)


def recipe_of(length=32, rope_scale=1.0, **options):
    recipe = tiny_recipe(
        model=blt(rope_scale),
        patcher=PatcherConfig(mode="static", patch_size=2, block_size=16),
        optimizer=AdamWConfig(learning_rate=1e-2, warmup_steps=2),
        **{"steps": 16, "eval_every": 16, **options},
    )
    return replace(
        recipe, data=replace(recipe.data, seq_len=length, batch_size=256 // length, partial="drop")
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("short")
    return fit(recipe_of(), run_dir, source=Letters(), devices=ONE), run_dir


def loss_at_start(recipe, folder):
    """The state a recipe begins with, and its loss on the validation split."""
    mesh = make_mesh(devices=ONE)
    with jax.set_mesh(mesh), Checkpointer(folder / "checkpoints") as checkpoints:
        data = open_data(recipe, mesh, source=Letters())
        setup, state, step, _ = begin(recipe, folder, data, mesh, checkpoints)
        assert step == 0
        return state, Validation(setup, Letters())(state)["loss"]


@pytest.mark.slow(days=28, group="whole runs", turn="a greater length")
def test_the_loss_at_the_old_length_is_kept(short, tmp_path):
    fitted, run_dir = short
    state, loss = loss_at_start(recipe_of(init_from=str(run_dir)), tmp_path)
    assert loss == pytest.approx(fitted.validation["loss"], rel=1e-6)
    _, slowed = loss_at_start(recipe_of(rope_scale=1e6, init_from=str(run_dir)), tmp_path)
    assert slowed != pytest.approx(loss, rel=1e-6)
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.slow(days=28, group="whole runs", turn="a greater length")
def test_training_goes_on_at_four_times_the_length(short, tmp_path):
    fitted, run_dir = short
    recipe = recipe_of(length=128, rope_scale=4.0, init_from=str(run_dir), log_every=1, steps=8, eval_every=8)
    state, before = loss_at_start(recipe, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, state.params, fitted.state.params)
    long = fit(recipe, tmp_path / "long", source=Letters(), devices=ONE)
    assert np.isfinite(list(losses(tmp_path / "long").values())).all()
    assert long.validation["loss"] < before < losses(run_dir)[2] - 1


def test_patches_are_cut_as_the_parameters_learned_them(tmp_path):
    base = configs.get("books")
    settled = replace(base.patcher, threshold=1.25, capacity=1200)
    write_resolved(tmp_path, Resolved(replace(base, patcher=settled), {}))
    assert inherit(configs.get("books_32k"), tmp_path).patcher == settled
    other = replace(configs.get("books_32k"), bytes_per_patch=6.0)
    assert inherit(other, tmp_path) == other
    fixed = replace(base, patcher=replace(base.patcher, threshold=2.0))
    assert inherit(fixed, tmp_path).patcher == replace(settled, threshold=2.0)


def test_books_32k_is_books_but_for_length_scale_and_schedule():
    short, long = configs.get("books"), configs.get("books_32k")
    assert long.data.seq_len == 4 * short.data.seq_len == 32_768
    assert long.data.batch_size * long.data.seq_len == short.data.batch_size * short.data.seq_len
    assert long.model.latent.mixers["attention"].rope_scale == 4.0
    latent = replace(long.model.latent, mixers=short.model.latent.mixers)
    assert replace(long.model, latent=latent) == short.model
    assert long.init_from == "runs/books"
