"""A frozen base: adapters are trained alone over it, and a run with one is read back as a whole model."""

import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import AdapterConfig, ChunkMean, Ema, Prefix, RouterConfig, attach, fuse, load_index
from jaxblt.answers import build_index
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig, unstack_periods
from jaxblt.models.products import products_in
from jaxblt.parallel import make_mesh
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.base import base_shapes, load_base, rounded
from jaxblt.training.start.setup import boxed_params, make_task
from jaxblt.training.state import BASE, Frozen, content_hash, whole_params
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.frozen_store import frozen_dir
from jaxblt.training.stored.integrity import StateMismatch
from jaxblt.training.stored.resolved import read_resolved
from tests.parameters import drawn
from tests.tolerances import assert_close
from tests.training.tiny import Letters, tiny_recipe

STACK = StackConfig(
    dim=16, num_layers=2, pattern="A", mlp_dim=16, mixers={"A": AttentionConfig(dim=16, num_heads=2)}
)
MODEL = ByteLMConfig(stack=STACK)
ROUTED = AdapterConfig(
    rank=4, router=RouterConfig(chunk=16, reads=(ChunkMean(), Prefix(16))), code=(Ema(0.5),)
)
GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "adapters.md").read_text(encoding="utf-8")
leaves = jax.tree.leaves_with_path
SHORT = {"steps": 4, "eval_every": 0, "checkpoint_every": 2, "checkpoint_every_s": None} | {
    "optimizer": AdamWConfig(learning_rate=1e-2, warmup_steps=0)
}


def train(recipe, run_dir):
    return fit(recipe, run_dir, source=Letters(), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def base_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("base")
    train(tiny_recipe(model=MODEL, **SHORT | {"steps": 2}), run_dir)
    return run_dir


def recipe_over(base_run, adapter=ROUTED, **options):
    options = SHORT | {"also_train": ("embedding",)} | options
    return tiny_recipe(model=attach(MODEL, adapter), base_run=str(base_run), **options)


@pytest.fixture(scope="module")
def run(base_run, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return train(recipe_over(base_run), run_dir), run_dir


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_the_trained_part_alone_has_slots_and_moves(run, base_run):
    fitted, run_dir = run
    base, state = jaxblt.load(base_run), fitted.state
    stored = state.frozen[BASE].params
    assert content_hash(stored) == read_resolved(run_dir).frozen[BASE]
    jax.tree.map(np.testing.assert_array_equal, stored, base.params)
    planned = base_shapes(fitted.recipe, lambda: boxed_params(make_task(fitted.recipe), fitted.recipe))[BASE]
    as_shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert as_shapes(planned.params) == as_shapes(stored)
    size = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * size
    paths = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves(state.params)}
    assert not [
        path for path in paths if not re.search("adapter/[uv]$|^stack/router/|^embedding/bytes$", path)
    ]
    assert all(np.abs(x).max() > 0 for path, x in paths.items() if path.endswith("/u"))
    assert np.abs(paths["embedding/bytes"] - base.params["embedding"]["bytes"]).max() > 0


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_that_was_killed_ends_bit_by_bit_as_one_that_was_not(run, base_run, tmp_path, capsys):
    fitted, run_dir = run
    shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    again = train(recipe_over(base_run), tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, again.state, fitted.state)
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0] == "adapters        stack, rank 4: A:mixer/q, A:mixer/k, A:mixer/v, A:mixer/out, A:mlp/down"
    )
    count = sum(x.size for x in jax.tree.leaves(fitted.state.params["stack"]["router"]))
    assert re.fullmatch(
        rf"trained  .* of .* parameters, of which routers {count:,} \(.*% of the base\)", said[1]
    )
    assert said[2] == "large router    over 5% of the base: RouterConfig.hidden makes it smaller"


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_a_loaded_run_is_a_whole_model(run):
    """Its logits are those of the train state; fused at a code it needs no adapter."""
    fitted, run_dir = run
    loaded = jaxblt.load(run_dir)
    assert not loaded.frozen
    assert loaded.decoder_params["model"] is loaded.params
    ids = jnp.arange(64, dtype=jnp.int32).reshape(2, 32) + 4
    apply = jax.jit(lambda params: loaded.model.apply({"params": params}, ids)[0])
    expected = apply(whole_params(fitted.state.params, fitted.state.frozen))
    np.testing.assert_array_equal(apply(loaded.params), expected)
    config, params = fuse(loaded.recipe.model, loaded.params, code=jnp.ones(4))
    assert config == MODEL
    assert jax.tree.structure(params) == jax.tree.structure(fitted.state.frozen[BASE].params)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_a_base_and_the_run_over_it_give_one_hash(run, base_run):
    _, run_dir = run
    stored = read_resolved(run_dir).frozen[BASE]
    assert jaxblt.load(base_run).base_hash == jaxblt.load(run_dir).base_hash == stored
    recipe = recipe_over(base_run, dtype="bfloat16")
    boxed = lambda: boxed_params(make_task(recipe), recipe)  # noqa: E731
    rounded_base = load_base(recipe, boxed, make_mesh(devices=jax.devices()[:1]))[BASE]
    assert jaxblt.load(base_run, dtype="bfloat16").base_hash == rounded_base.content_hash != stored


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_ranks_by_depth_go_over_a_base_that_was_scanned(base_run):
    """Its layers come apart, each split over the devices."""
    unrolled = replace(MODEL, stack=replace(STACK, scan=False))
    adapter = AdapterConfig(sites=(("mlp/down", (2, 4)),))
    recipe = tiny_recipe(model=attach(unrolled, adapter), base_run=str(base_run), **SHORT)
    mesh = make_mesh(devices=jax.devices()[:4], data=1, fsdp=2, tensor=2)
    held = load_base(recipe, lambda: boxed_params(make_task(recipe), recipe), mesh)[BASE].params
    stored = jaxblt.load(base_run).params
    wanted = stored | {"stack": unstack_periods(stored["stack"])}
    jax.tree.map(np.testing.assert_array_equal, held, wanted)
    assert held["stack"].keys() >= {"period_0", "period_1"}
    down = held["stack"]["period_1"]["block_0"]["mlp"]["down"]["kernel"]
    assert len({shard.index for shard in down.addressable_shards}) == 4


@pytest.mark.slow(days=28, group="whole runs")
def test_a_base_is_stored_as_the_model_reads_it():
    """Kernels and tables in the compute dtype; what is read in fp32 stays so, recurrent matrices of a GRU too."""
    config = ByteLMConfig(stack=StackConfig(dim=16, num_layers=3, pattern=("H", "A", "gru"), mlp_dim=16))
    model, ids = config.build(dtype=jnp.bfloat16), jnp.zeros((1, 8), jnp.int32)
    trace = lambda: jax.eval_shape(model.init, jax.random.key(0), ids)["params"]  # noqa: E731
    products, boxed = products_in(jnp.bfloat16, trace)
    params = drawn(model, ids)["params"]
    base = rounded(params, boxed, jnp.bfloat16, products)
    dtypes = {jax.tree_util.keystr(p, simple=True, separator="/"): x.dtype for p, x in leaves(base)}
    block = "stack/periods/block_0"
    assert dtypes[f"{block}/mixer/in/kernel"] == dtypes["embedding/bytes"] == jnp.bfloat16
    exact = [f"{block}/mixer/short", f"{block}/mixer_norm/scale", "head/norm/scale"]
    assert {dtypes[path] for path in exact} == {jnp.dtype(jnp.float32)}
    assert {d for path, d in dtypes.items() if "/long_" in path} == {jnp.dtype(jnp.float32)}
    logits = jax.jit(lambda params: model.apply({"params": params}, ids)[0])
    found = logits(whole_params({}, {BASE: Frozen(base, "")}))
    assert_close(found, logits(params), dtype=jnp.bfloat16, n=16)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_a_base_of_another_hash_is_refused(run, base_run, tmp_path):
    fitted, run_dir = run
    shutil.copytree(run_dir, tmp_path / "run")
    folder = frozen_dir(tmp_path / "run", fitted.state.frozen[BASE].content_hash)
    shutil.rmtree(folder)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(0, jax.tree.map(lambda x: x + 1, fitted.state.frozen[BASE].params))
    with pytest.raises(StateMismatch, match="holds another tree than the run's frozen 'base'"):
        jaxblt.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"undo these changes:\n  base_run: .*\n  also_train: "):
        train(recipe_over(tmp_path, also_train=()), run_dir)


@pytest.mark.slow(days=28, group="costly", turn="training/start/test_base")
def test_what_cannot_be_a_base(run, base_run, tmp_path):
    with pytest.raises(ValueError, match="adapters over a base of its own"):
        train(recipe_over(run[1]), tmp_path / "a")
    wider = attach(replace(MODEL, stack=replace(STACK, mlp_dim=32)), ROUTED)
    with pytest.raises(ValueError, match=r"another model.*model.stack.mlp_dim: 16 -> 32"):
        train(replace(recipe_over(base_run), model=wider), tmp_path / "a")
    with pytest.raises(ValueError, match="nothing is left to train"):
        train(replace(recipe_over(base_run, also_train=()), model=MODEL), tmp_path / "a")
    with pytest.raises(
        ValueError, match=r"'embeding' matches no parameter; the nearest names are \['embedding/bytes'"
    ):
        train(recipe_over(base_run, also_train=("embeding",)), tmp_path / "a")
    with pytest.raises(ValueError, match="both say what the run starts from"):
        recipe_over(base_run, init_from="runs/a")
    with pytest.raises(ValueError, match=r"also_train=.* base_run is None"):
        tiny_recipe(model=MODEL, also_train=("embedding",))
    assert not (tmp_path / "a").exists()


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_guide_runs(run, base_run, monkeypatch, tmp_path):
    """Its training is that of the run above."""

    def copy_run(recipe, run_dir):
        assert (
            replace(recipe, name="tiny", base_run=str(base_run), train=fitted.recipe.train) == fitted.recipe
        )
        shutil.copytree(trained_in, run_dir)

    fitted, trained_in = run
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base_run, "runs/base")
    monkeypatch.setattr("jaxblt.training.loop.fit", copy_run)
    monkeypatch.setattr("jaxblt.answers.build_index", partial(build_index, source=Letters(), batch_size=8))
    namespace: dict = {}
    for example in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(compile(example, "adapters.md", "exec"), namespace)
    assert namespace["config"] == MODEL
    report, alarms = namespace["telemetry"].report(), namespace["telemetry"].alarms()
    assert (report["calls"], report["active"], alarms) == (1, 1, [])
    assert Path("runs/peft/adapter_model.safetensors").stat().st_size
    searching, mesh = namespace["searching"], make_mesh(devices=jax.devices()[:1])
    held = load_base(searching, lambda: boxed_params(make_task(searching), searching), mesh)[BASE].params
    np.testing.assert_array_equal(
        held["stack"]["router"]["index"]["vectors"][:100], load_index("runs/index").vectors[:100]
    )
