"""A run whose experts start as LoRAs: another run's, and one in PEFT files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, Sticky, attach, fuse, save_peft
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.stack import stack_periods, unstack_periods
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.experts import base_hashes, with_experts
from jaxblt.training.start.setup import init_state, make_setup
from jaxblt.training.state import BASE, Frozen, freeze, whole_params
from jaxblt.training.stored.resolved import Resolved, read_resolved, write_resolved
from tests.adapters.routing import TURNS
from tests.training.tiny import Letters, tiny_recipe

PLAIN = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8))
LORA = AdapterConfig(sites=("mlp/down",), rank=2)
BANK = AdapterConfig(
    sites=("mlp/down",),
    rank=4,
    blocks=2,
    router=RouterConfig(chunk=4, reads=(ChunkMean(),), hidden=4),
    code=(Sticky(0.0),),
)
SHORT = {"steps": 2, "eval_every": 0, "optimizer": AdamWConfig(learning_rate=1e-1, warmup_steps=0)}


def train(folder, model, **options):
    return fit(
        tiny_recipe(model=model, **SHORT | options), folder, source=Letters(), devices=jax.devices()[:1]
    )


@TURNS
def test_experts_are_the_loras_of_runs_and_of_files(tmp_path):
    train(tmp_path / "base", PLAIN)
    lora = train(tmp_path / "lora", attach(PLAIN, LORA), base_run=str(tmp_path / "base"))
    run = jaxblt.load(tmp_path / "lora")
    save_peft(tmp_path / "peft", run.recipe.model, run.params, base_hash=run.base_hash)
    save_peft(tmp_path / "unnamed", run.recipe.model, run.params)
    folders = str(tmp_path / "lora"), str(tmp_path / "peft")
    recipe = tiny_recipe(model=attach(PLAIN, BANK), base_run=str(tmp_path / "base"), experts=folders, **SHORT)
    mesh = recipe.mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        frozen = dict(lora.state.frozen)
        drawn = init_state(make_setup(recipe, mesh, frozen), frozen)
        begun = with_experts(recipe, drawn.params, frozen, mesh)
        unnamed = dataclasses.replace(recipe, experts=(folders[0], str(tmp_path / "unnamed")))
        again = with_experts(unnamed, drawn.params, frozen, mesh)
        jax.tree.map(np.testing.assert_array_equal, again, begun)
    wanted = fuse(run.recipe.model, run.params)[1]
    for code in np.eye(2, dtype=np.float32):
        found = fuse(recipe.model, whole_params(begun, frozen), code=jnp.asarray(code))[1]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
    _check_over_an_unrolled_base(recipe, frozen, mesh, wanted)
    began = train(tmp_path / "bank", recipe.model, base_run=str(tmp_path / "base"), experts=folders)
    assert read_resolved(tmp_path / "bank").recipe.experts == folders
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), began.state.params, begun)
    assert all(size > 0 for size in jax.tree.leaves(moved["stack"]["periods"]))
    other = train(tmp_path / "other", PLAIN, seed=1)
    assert other.finished
    with pytest.raises(
        ValueError, match=r"lora' was trained over another base than base_run=.*use LoRAs of this base"
    ):
        train(tmp_path / "c", recipe.model, base_run=str(tmp_path / "other"), experts=folders)


def _check_over_an_unrolled_base(recipe, frozen, mesh, wanted):
    """An unrolled bank starts from LoRAs over the scanned base: the same parameters under other names."""
    model = dataclasses.replace(recipe.model, stack=dataclasses.replace(recipe.model.stack, scan=False))
    own, base = dataclasses.replace(recipe, model=model), dict(frozen[BASE].params)
    base["stack"] = unstack_periods(base["stack"])
    frozen = {BASE: freeze(base)}
    with jax.set_mesh(mesh):
        drawn = init_state(make_setup(own, mesh, frozen), frozen)
        begun = with_experts(own, drawn.params, frozen, mesh)
    found = fuse(model, whole_params(begun, frozen), code=jnp.asarray([1.0, 0.0]))[1]
    again = {**found, "stack": stack_periods(found["stack"])}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), again, wanted)


def test_a_base_is_known_scanned_unrolled_and_with_an_index():
    block = {"mlp": {"kernel": jnp.arange(12, dtype=jnp.bfloat16).reshape(2, 2, 3)}}
    scanned = {"stack": {"periods": {"block_0": block}}, "head": jnp.ones(3)}
    unrolled = {**scanned, "stack": unstack_periods(scanned["stack"])}
    searched = {**scanned, "stack": {**scanned["stack"], "router": {"index": {"keys": jnp.ones(4)}}}}
    expected = [freeze(tree).content_hash for tree in (scanned, unrolled)]
    assert expected[0] != expected[1]
    for tree in (scanned, unrolled, searched):
        assert base_hashes(PLAIN, freeze(tree)) == expected
    other = {**scanned, "head": jnp.zeros(3)}
    assert not set(base_hashes(PLAIN, freeze(other))) & set(expected)


def test_experts_need_a_base():
    with pytest.raises(ValueError, match=r"are LoRAs over a frozen base, and base_run is None: set it"):
        tiny_recipe(model=attach(PLAIN, BANK), experts=("runs/lora",))


def test_a_lora_that_was_trained_with_more_is_no_expert(tmp_path):
    """Its updates are of a model with those other parameters, which an expert does not have."""
    own = tiny_recipe(model=attach(PLAIN, LORA), base_run="b", also_train=("embedding/*",))
    write_resolved(tmp_path, Resolved(own, {BASE: "a" * 64}))
    recipe = tiny_recipe(model=attach(PLAIN, BANK), base_run="b", experts=(str(tmp_path),))
    with pytest.raises(
        ValueError, match=r"has also_train = \('embedding/\*',\), which its LoRA was trained with"
    ):
        with_experts(recipe, {}, {BASE: Frozen({}, "a" * 64)}, None)
