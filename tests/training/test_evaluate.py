import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data import make_dataset
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.training.evaluate import Validation, evaluate, make_eval_step, summarise, target_ids
from jaxblt.training.objectives.objectives import Masked, NextByte
from jaxblt.training.start.setup import init_state, make_setup
from jaxblt.training.state import TrainState, freeze_entropy
from jaxblt.training.step import Task
from tests.parameters import drawn
from tests.training.tiny import Letters, TinyConfig, random_batch, tiny_recipe


@pytest.fixture(scope="module")
def setup():
    mesh = make_mesh(devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        setup = make_setup(tiny_recipe(), mesh)
        return setup, init_state(setup)


def test_every_target_of_a_split_counts_once(setup):
    """Against a pass over the split by hand, whose last batch and last row are not full."""
    setup, state = setup
    data = make_dataset(setup.recipe.data, split="test", mode="eval", source=Letters())
    assert data.num_rows % 8
    with jax.set_mesh(setup.mesh):
        step = make_eval_step(setup.eval_task, targets=target_ids("AC"))
        found = evaluate(step, state, data, setup.mesh)
    nll = count = chosen_nll = chosen = 0.0
    apply = jax.jit(lambda *args, **ids: jax.nn.log_softmax(setup.task.model.apply(*args, **ids)[0]))
    for index in range(data.num_batches):
        batch = data.batch(index)
        found_log_p = apply({"params": state.params}, batch.inputs, segment_ids=batch.segment_ids)
        log_p = np.asarray(found_log_p, np.float64)
        loss = -np.take_along_axis(log_p, batch.targets[..., None], -1)[..., 0]
        scored = batch.loss_mask == 1
        among = scored & np.isin(batch.targets, [ord("A") + 4, ord("C") + 4])
        nll, count = nll + loss[scored].sum(), count + scored.sum()
        chosen_nll, chosen = chosen_nll + loss[among].sum(), chosen + among.sum()
    assert found["bytes"] == count == data.num_bytes + 1
    assert found["target_bytes"] == chosen
    np.testing.assert_allclose(found["loss"], nll / count, rtol=1e-5)
    np.testing.assert_allclose(found["bits_per_byte"], nll / count / math.log(2), rtol=1e-5)
    np.testing.assert_allclose(found["target_loss"], chosen_nll / chosen, rtol=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="training/test_evaluate")
def test_rows_that_are_wholly_right_are_counted(setup):
    setup, state = setup
    objective = NextByte(accuracy=True)
    data = make_dataset(setup.recipe.data, split="test", mode="eval", source=Letters())
    with jax.set_mesh(setup.mesh):
        step = make_eval_step(replace(setup.eval_task, objective=objective))
        found = evaluate(step, state, data, setup.mesh, objective=objective)
    right = count = right_rows = rows = 0
    for index in range(data.num_batches):
        batch = data.batch(index)
        apply = setup.task.model.apply
        logits, _ = apply({"params": state.params}, batch.inputs, segment_ids=batch.segment_ids)
        scored = np.asarray(batch.loss_mask) == 1
        hit = np.asarray(logits).argmax(-1) == batch.targets
        right, count = right + (hit & scored).sum(), count + scored.sum()
        right_rows += (scored.any(1) & (hit | ~scored).all(1)).sum()
        rows += scored.any(1).sum()
    assert found["accuracy"] == pytest.approx(right / count)
    assert found["row_accuracy"] == pytest.approx(right_rows / rows)


def test_sums_that_are_not_finite_name_batch_and_parameters(setup):
    setup, state = setup
    data = make_dataset(setup.recipe.data, split="test", mode="eval", source=Letters())

    def score(params):
        def step(state, batch, index):
            return {"nll": np.float32(np.nan if index == 1 else 1), "bytes": 1.0}

        return evaluate(step, state.replace(params=params), data, setup.mesh)

    with jax.set_mesh(setup.mesh):
        with pytest.raises(
            ValueError, match="batch 1 of the split: the sum of nll is nan; all parameters are"
        ):
            score(state.params)
        broken = dict(state.params)
        broken |= {"up": {**broken["up"], "bias": broken["up"]["bias"].at[3].set(np.inf)}}
        with pytest.raises(
            ValueError, match="the sum of nll is nan; parameters model/up/bias hold NaN or inf"
        ):
            score(broken)
        everywhere = jax.tree.map(lambda p: p * np.nan, state.params)
        named = "parameters model/embedding, model/head/kernel, model/positions and 2 more hold"
        with pytest.raises(ValueError, match=named):
            score(everywhere)


def test_entropies_that_are_not_finite_show_in_the_sums():
    """They cut no patch, and the losses stay finite."""
    model, batch = TinyConfig().build(), random_batch(0)
    params = drawn(model, batch.inputs)["params"]
    patcher = PatcherConfig(mode="entropy", threshold=1.0, block_size=16, capacity=8)
    step = make_eval_step(Task(TinyConfig().build(patcher=patcher), entropy_model=model))
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, (), zero, zero, freeze_entropy(params))
    assert step(state, batch, 0)["entropies"] > 0
    broken = {**params, "embedding": params["embedding"].at[ord("A") + 4].set(np.nan)}
    sums = step(state.replace(frozen=freeze_entropy(broken)), batch, 0)
    assert np.isnan(sums["entropies"])
    assert np.isfinite(sums["nll"])


def test_validation_stops_where_the_recipe_says(setup):
    setup, state = setup
    with jax.set_mesh(setup.mesh):
        assert Validation(setup, Letters())(state)["bytes"] > 8 * 32
        recipe = tiny_recipe(eval_batches=1)
        limited = Validation(make_setup(recipe, setup.mesh), Letters())
        assert limited(state)["bytes"] == 8 * 32


@pytest.mark.slow(days=28, group="costly", turn="training/test_evaluate")
def test_objective_is_drawn_anew_for_each_batch_and_alike_each_time():
    config = TinyConfig(causal=False)
    model = config.build()
    params = drawn(model, jnp.zeros((1, 32), jnp.int32))["params"]
    data = make_dataset(tiny_recipe().data, split="test", mode="eval", source=Letters())
    batch = jax.tree.map(jnp.asarray, data.batch(0))
    step = make_eval_step(Task(model, objective=Masked()))

    zero = jnp.zeros((), jnp.int32)
    state = TrainState(zero, params, (), zero, zero)
    sums = [float(step(state, batch, index)["nll"]) for index in (0, 0, 1)]
    assert sums[0] == sums[1] != sums[2]


def test_sums_become_figures_per_byte():
    totals = {
        "nll": 8 * math.log(2),
        "weight": 4.0,
        "loss": 8 * math.log(2),
        "patches": 2.0,
        "patched_bytes": 7.0,
        "refused": 1.0,
    }
    found = summarise(totals)
    assert found.pop("overflow") == pytest.approx(1 / 3)
    assert found.pop("refused") == 1
    assert found == pytest.approx(
        {"loss": 2 * math.log(2), "bits_per_byte": 2.0, "bytes": 4.0, "bytes_per_patch": 3.5}
    )
    with pytest.raises(ValueError, match="no scored byte"):
        summarise({"nll": 0.0, "loss": 0.0, "weight": 0.0})
    with pytest.raises(ValueError, match="no target byte"):
        summarise({"nll": 1.0, "loss": 1.0, "weight": 1.0, "target_nll": 0.0, "target_weight": 0.0})


def test_target_ids():
    assert target_ids(None) is None
    assert target_ids("AC") == (ord("A") + 4, ord("C") + 4)
    with pytest.raises(ValueError, match="targets = 'é' must be characters of one byte"):
        target_ids("é")
