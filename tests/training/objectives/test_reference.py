"""A second model in training: its divergence by hand, on a share of rows, and a run that imitates another."""

import shutil
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxblt
from jaxblt.adapters import AdapterConfig, attach, split_params
from jaxblt.data import Batch
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Masked
from jaxblt.training.objectives.reference import Reference, ReferenceConfig, divergence, every_nth
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.setup import make_task
from jaxblt.training.state import BASE, REFERENCE, freeze, start
from jaxblt.training.step import Task, make_train_step
from jaxblt.training.stored.resolved import read_resolved
from tests.adapters.routing import TURNS
from tests.parameters import drawn
from tests.training.tiny import Letters, TinyConfig, tiny_recipe

MODEL = TinyConfig()
SHORT = {"steps": 4, "eval_every": 0, "checkpoint_every": 2, "checkpoint_every_s": None} | {
    "optimizer": AdamWConfig(learning_rate=1e-2, warmup_steps=0)
}


def rows_of(count=4, length=10):
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (count, length)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], ids.shape)
    mask = jnp.asarray(np.random.default_rng(1).random(ids.shape) < 0.7, jnp.float32)
    return Batch(ids, ids, jnp.ones_like(ids), positions, mask)


def test_the_divergence_by_hand():
    p, q = np.asarray([0.5, 0.25, 0.25]), np.asarray([0.2, 0.2, 0.6])
    batch = rows_of(1, 2)
    batch = replace(batch, loss_mask=jnp.asarray([[1.0, 0.0]]))
    given = (jnp.log(jnp.broadcast_to(jnp.asarray(x, jnp.float32), (1, 2, 3))) + 5 for x in (q, p))
    np.testing.assert_allclose(divergence(*given, batch), np.sum(p * np.log(p / q)), rtol=1e-5)


@pytest.mark.slow(days=28, group="whole runs")
def test_a_step_compares_every_nth_row_of_each_micro_batch():
    """The reported divergence is that of rows 0 and 1 of four, which are the first of two micro-batches."""
    batch, model = rows_of(), MODEL.build()
    own, other = (drawn(model, batch.inputs, seed=seed)["params"] for seed in (0, 1))
    reference = Reference(model, REFERENCE, weight=0.5, every=2)
    optimizer, frozen = optax.sgd(1.0), {REFERENCE: freeze(jax.tree.map(jnp.copy, other))}
    step = make_train_step(Task(model, reference=reference), optimizer, accumulate=2)
    state, metrics = step(start(jax.tree.map(jnp.copy, own), optimizer, frozen), batch)

    def kl(params):
        first = jax.tree.map(lambda x: x[:2], batch)
        both = [
            model.apply({"params": p}, first.inputs, segment_ids=first.segment_ids)[0]
            for p in (params, other)
        ]
        return 2 * divergence(both[0], both[1], first) / jnp.sum(batch.loss_mask)

    def loss(params):
        logits = model.apply({"params": params}, batch.inputs, segment_ids=batch.segment_ids)[0]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], -1)[..., 0]
        return -jnp.sum(picked * batch.loss_mask) / jnp.sum(batch.loss_mask)

    def total(params):
        parts = loss(params), kl(params)
        return parts[0] + 0.5 * parts[1], parts

    gradient, parts = jax.jit(jax.grad(total, has_aux=True))(own)
    np.testing.assert_allclose((metrics["loss"], metrics["reference_kl"]), parts, rtol=1e-5)
    for new, old, g in zip(*map(jax.tree.leaves, (state.params, own, gradient)), strict=True):
        np.testing.assert_allclose(new, old - g, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"reference.every = 3 does not divide the 4 rows"):
        every_nth(batch, 3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("teacher")
    fit(
        tiny_recipe(model=MODEL, **SHORT | {"steps": 2}), run_dir, source=Letters(), devices=jax.devices()[:1]
    )
    return run_dir


@pytest.mark.slow(days=28, group="whole runs")
@TURNS
def test_a_run_imitates_another_and_goes_on_bit_by_bit(teacher, tmp_path):
    reference = ReferenceConfig(run=str(teacher), weight=2.0, every=2)
    recipe = tiny_recipe(model=MODEL, reference=reference, **SHORT)
    train = lambda folder: fit(recipe, tmp_path / folder, source=Letters(), devices=jax.devices()[:1])  # noqa: E731
    fitted = train("a")
    assert fitted.recipe.reference == replace(reference, model=MODEL)
    stored = fitted.state.frozen[REFERENCE]
    assert read_resolved(tmp_path / "a").frozen == {REFERENCE: stored.content_hash}
    jax.tree.map(np.testing.assert_array_equal, stored.params, jaxblt.load(teacher).params)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "4")
    jax.tree.map(np.testing.assert_array_equal, train("b").state, fitted.state)
    assert not jaxblt.load(tmp_path / "a").frozen
    other = replace(recipe, reference=replace(reference, weight=1.0))
    with pytest.raises(ValueError, match=r"undo these changes: reference.weight: 2.0 -> 1.0"):
        fit(other, tmp_path / "a", source=Letters(), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="predicts 260 ids, and the recipe's model 300"):
        fit(
            replace(recipe, model=TinyConfig(vocab_size=300)),
            tmp_path / "c",
            source=Letters(),
            devices=jax.devices()[:1],
        )


def test_the_base_is_a_reference_without_its_adapters():
    config = attach(
        ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8)),
        AdapterConfig(rank=2),
    )
    task = make_task(tiny_recipe(model=config, base_run="runs/base", reference=ReferenceConfig()))
    assert task.reference is not None
    assert task.reference.tree == BASE
    assert task.reference.model.config.stack.adapter is None
    assert make_task(tiny_recipe(model=MODEL)).reference is None


@pytest.mark.slow(days=28, group="whole runs")
def test_the_divergence_from_the_base_is_0_at_first_alone():
    """The adapter begins as the base, and moves away with its first step."""
    plain = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8))
    recipe = tiny_recipe(
        model=attach(plain, AdapterConfig(rank=2)), base_run="runs/base", reference=ReferenceConfig()
    )
    batch, task = rows_of(), make_task(recipe)
    base = drawn(plain.build(), batch.inputs)["params"]
    trained = split_params(nn.meta.unbox(task.model.init(jax.random.key(0), batch.inputs))["params"])[1]
    optimizer = optax.sgd(0.1)
    state = start(trained, optimizer, {BASE: freeze(base)})
    step, found = make_train_step(task, optimizer), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append((float(metrics["reference_kl"]), float(metrics["loss"])))
    (first, loss), *rest = found
    assert abs(first) < 1e-6
    assert all(kl > 1e-5 for kl, _ in rest)
    assert rest[-1][1] < loss


def test_what_is_refused():
    with pytest.raises(ValueError, match="stands for the frozen base, and base_run is None"):
        tiny_recipe(model=MODEL, reference=ReferenceConfig())
    with pytest.raises(ValueError, match="the objective is Masked: use NextByte"):
        tiny_recipe(model=TinyConfig(causal=False), objective=Masked(), reference=ReferenceConfig(run="a"))
