"""The exponential moving average of the parameters: its maths, its way through a run, and who reads it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxblt
from jaxblt.cli.main import call
from jaxblt.training.log.runlog import read_metrics
from jaxblt.training.loop import fit
from jaxblt.training.state import averaged, start
from jaxblt.training.step import Task, make_train_step
from tests.parameters import drawn
from tests.training.tiny import Letters, TinyConfig, random_batch, tiny_recipe

DECAY = 0.9
OPTIONS = {"steps": 6, "eval_every": 2, "eval_batches": 1, "checkpoint_every": 1, "keep": 9}
AVERAGED = tiny_recipe(**OPTIONS, ema=DECAY, mesh={"fsdp": 2})


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_the_average_is_that_of_optax_with_its_bias_corrected(decay):
    tree = {"a": jnp.arange(3, dtype=jnp.float32), "b": jnp.ones((), jnp.float32)}
    reference = optax.ema(decay, debias=True)
    state, mean = reference.init(tree), jax.tree.map(lambda x: x + 100, tree)
    for count in range(1, 6):
        tree = jax.tree.map(lambda x, by=count: x * 1.5 - by, tree)
        with jax.numpy_dtype_promotion("standard"):
            expected, state = reference.update(tree, state)
        mean = averaged(mean, tree, decay, jnp.int32(count))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3 if decay > 0.99 else 1e-6), mean, expected
        )


def test_a_step_averages_good_steps_only_and_a_state_without_average_has_none():
    task = Task(TinyConfig(dim=8).build())
    params = drawn(task.model, jnp.zeros((1, 32), jnp.int32))["params"]
    sgd, good = optax.sgd(0.1), random_batch(0)
    bad = good.replace(loss_mask=good.loss_mask * 0)
    step = make_train_step(task, sgd, ema=DECAY)
    state, seen = start(jax.tree.map(jnp.array, params), sgd, ema=True), []
    for batch in (bad, good, bad, good, good):
        before = jax.tree.map(np.asarray, state.ema)
        state, _ = step(state, batch)
        if batch is bad:
            same(state.ema, before)
        else:
            seen.append(jax.tree.map(np.asarray, state.params))
    weights = DECAY ** np.arange(len(seen))[::-1]
    expected = jax.tree.map(lambda *values: np.average(values, 0, weights), *seen)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), state.ema, expected)
    plain, averaging = start(params, sgd), start(params, sgd, ema=True)
    assert plain.ema is None
    assert len(jax.tree.leaves(averaging)) == len(jax.tree.leaves(plain)) + len(jax.tree.leaves(params))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("ema")
    return fit(AVERAGED, run_dir, source=Letters()), run_dir


@pytest.mark.slow(days=28, group="costly", turn="training/test_ema")
def test_the_average_lies_as_the_parameters_and_differs_from_them(run):
    state = run[0].state
    for mean, leaf in zip(jax.tree.leaves(state.ema), jax.tree.leaves(state.params), strict=True):
        assert mean.sharding == leaf.sharding
    assert any("fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(state.ema))
    assert not np.array_equal(state.ema["head"]["kernel"], state.params["head"]["kernel"])


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_goes_on_with_its_average_bit_for_bit(run, tmp_path):
    train = dataclasses.replace(AVERAGED.train, time_limit_s=1e-9)
    assert fit(dataclasses.replace(AVERAGED, train=train), tmp_path, source=Letters()).step == 1
    resumed = fit(AVERAGED, tmp_path, source=Letters())
    same(resumed.state.ema, run[0].state.ema)
    same(resumed.state.params, run[0].state.params)


@pytest.mark.slow(days=28, group="costly", turn="training/test_ema")
def test_a_run_is_judged_and_read_by_its_average_unless_told_otherwise(run, tmp_path):
    fitted, run_dir = run
    mean, raw = jaxblt.load(run_dir), jaxblt.load(run_dir, weights="raw")
    assert (mean.weights, raw.weights) == ("ema", "raw")
    same(mean.params, fitted.state.ema)
    same(raw.params, fitted.state.params)
    assert "average over steps (ema 0.9)" in repr(mean)
    scores = [loaded.evaluate("validation", source=Letters(), max_batches=1) for loaded in (mean, raw)]
    last = list(read_metrics(run_dir / "metrics.jsonl"))[-1]
    assert scores[0]["loss"] == pytest.approx(last["validation/loss"], rel=1e-6)
    assert scores[1]["loss"] != pytest.approx(last["validation/loss"], rel=1e-6)
    call("export", [str(run_dir), "--out", str(tmp_path / "raw.safetensors"), "--weights", "raw"])
    content = (tmp_path / "raw.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"]["weights"] == "raw"
    where = header["model.head.kernel"]["data_offsets"]
    body = content[8 + int.from_bytes(content[:8], "little") :]
    assert body[where[0] : where[1]] == np.asarray(raw.params["head"]["kernel"]).tobytes()


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_without_average_goes_on_with_one_and_back(tmp_path):
    """What it is resumed from is a checkpoint as it was before there were averages."""
    options = OPTIONS | {"eval_every": 0}
    plain, with_ema = tiny_recipe(**options, time_limit_s=1e-9), tiny_recipe(**options, ema=DECAY)
    longer = tiny_recipe(**options | {"steps": 7})
    assert fit(plain, tmp_path, source=Letters()).step == 1
    with pytest.raises(ValueError, match="has no average of its parameters"):
        jaxblt.load(tmp_path, weights="ema")
    before = jaxblt.load(tmp_path).params
    fitted = fit(with_ema, tmp_path, source=Letters(), resume_with=True)
    assert fitted.state.ema is not None
    assert not np.array_equal(fitted.state.ema["head"]["kernel"], before["head"]["kernel"])
    assert fit(longer, tmp_path, source=Letters(), resume_with=True).state.ema is None
    assert jaxblt.load(tmp_path).weights == "raw"
