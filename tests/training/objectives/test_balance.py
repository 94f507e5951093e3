"""GradNorm and dynamic weight averaging: the rules step by step in NumPy, and what the gradients of heads hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.models import LabelHeadConfig, TaskHead, TaskHeadsConfig
from jaxblt.models.labeller import HEAD
from jaxblt.models.task_heads import PROBES, TASK_WEIGHTS
from jaxblt.training.objectives.balance import balanced
from jaxblt.training.objectives.objectives import Classify, MultiTask, TaskLoss
from tests.parameters import drawn
from tests.training.objectives.test_task_scores import CLASSES, KEY, NUMBER, B, T, batch_of

RNG = np.random.default_rng(0)
STEPS, TASKS, DIM = 8, 3, 5
LOSSES = RNG.uniform(0.2, 3, (STEPS, TASKS)).astype(np.float32)
SLOPES = RNG.normal(size=(STEPS, TASKS, DIM)).astype(np.float32)
LOSSES[2, 1] = 0  # a batch without a label of the second task


def run(balance):
    """Weights behind each step, and another parameter, trained by plain descent with gradients of 1."""
    params = {"stack": jnp.zeros(2), HEAD: {TASK_WEIGHTS: jnp.ones(TASKS), PROBES: jnp.zeros((TASKS, DIM))}}
    optimizer = balanced(optax.sgd(0.5), balance)
    state, found = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for losses, slopes in zip(LOSSES, SLOPES, strict=True):
        weighed = jnp.asarray(slopes) * params[HEAD][TASK_WEIGHTS][:, None]
        grads = {"stack": jnp.ones(2), HEAD: {TASK_WEIGHTS: jnp.asarray(losses), PROBES: weighed}}
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(np.asarray(params[HEAD][TASK_WEIGHTS]))
    np.testing.assert_allclose(params["stack"], -0.5 * STEPS)
    assert not np.any(params[HEAD][PROBES])
    return np.array(found)


def test_gradnorm_as_written_out():
    w, first = np.ones(TASKS), LOSSES[0].astype(np.float64)
    for losses, slopes, found in zip(LOSSES, SLOPES, run("gradnorm"), strict=True):
        if losses.all():
            norms = np.array([w[i] * np.linalg.norm(slopes[i]) for i in range(TASKS)])
            relative = losses / first
            target = norms.mean() * (relative / relative.mean()) ** 1.5
            w = w - 0.025 * np.sign(norms - target) * norms / w
            w = np.maximum(w, 0.01) * TASKS / np.maximum(w, 0.01).sum()
        np.testing.assert_allclose(found, w, rtol=1e-5)
    assert np.abs(w - 1).max() > 0.05


def test_dynamic_weight_averaging_as_written_out(monkeypatch):
    monkeypatch.setattr("jaxblt.training.objectives.balance.WINDOW", 2)
    found = run("dwa")
    windows = LOSSES.reshape(STEPS // 2, 2, TASKS).astype(np.float64)
    means = windows.sum(1) / (windows > 0).sum(1)
    for k in range(STEPS // 2):
        wanted = np.ones(TASKS)
        if k:
            e = np.exp(means[k] / means[k - 1] / 2)
            wanted = TASKS * e / e.sum()
        np.testing.assert_allclose(found[2 * k + 1], wanted, rtol=1e-5)
        if k + 1 < STEPS // 2:
            np.testing.assert_array_equal(found[2 * k + 2], found[2 * k + 1])


@pytest.mark.slow(days=28, group="costly", every="gradnorm")
@pytest.mark.parametrize("balance", ["gradnorm", "dwa"])
def test_gradients_of_heads_hold_losses_and_weighed_slopes(balance):
    kind, size = LabelHeadConfig(outputs=CLASSES), LabelHeadConfig(target="number", outputs=1)
    config = TaskHeadsConfig((TaskHead("kind", kind), TaskHead("size", size)), balance=balance)
    objective = MultiTask((TaskLoss("kind", Classify()), TaskLoss("size", NUMBER)), balance)
    batch = objective(KEY, batch_of())
    x = jax.random.normal(jax.random.key(3), (B, T, DIM), jnp.float32)
    heads = config.build(True, jnp.float32)
    params = drawn(heads, x, batch.inputs, batch.segment_ids)["params"]
    names = {TASK_WEIGHTS, PROBES} if balance == "gradnorm" else {TASK_WEIGHTS}
    assert params.keys() == {"kind", "size"} | names
    params[TASK_WEIGHTS] = jnp.asarray([0.5, 2.0])
    params |= {PROBES: jnp.zeros((2, DIM))} if balance == "gradnorm" else {}

    def sums_of(params, x):
        return objective.sums(heads.apply({"params": params}, x, batch.inputs, batch.segment_ids), batch)

    def loss_of(params, x):
        return sums_of(params, x)["loss"] / objective.weight(batch)

    grads, by_state = jax.jit(jax.grad(loss_of, (0, 1)))(params, x)
    figures = jax.device_get(jax.jit(lambda *of: objective.figures(sums_of(*of)))(params, x))
    np.testing.assert_allclose(grads[TASK_WEIGHTS], [figures["kind/loss"], figures["size/loss"]], rtol=1e-5)
    np.testing.assert_allclose([figures["kind/weight"], figures["size/weight"]], [0.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(
        figures["loss"], 0.5 * figures["kind/loss"] + 2 * figures["size/loss"], rtol=1e-5
    )
    if balance == "gradnorm":  # ∂/∂e of all tasks together is what scaling the shared states does
        np.testing.assert_allclose(
            np.asarray(grads[PROBES]).sum(0),
            np.sum(np.asarray(by_state) * np.asarray(x), (0, 1)),
            rtol=1e-4,
            atol=1e-6,
        )
