"""Several tasks at once: losses and gradients by hand, what must not count, and one task as if it were alone."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.data.batch import Batch
from jaxblt.data.label_tasks import UNLABELLED
from jaxblt.models import LabelHeadConfig, TaskAnswers, TaskHead, TaskHeadsConfig
from jaxblt.training.evaluate import ROWS, Collected, _add
from jaxblt.training.objectives.objectives import Classify, MultiTask, Regress, TaskLoss
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from tests.parameters import drawn
from tests.tolerances import tol

B, T, CLASSES = 8, 6, 3
KEY = jax.random.key(0)
NUMBER = Regress(center=5.0, scale=2.0)
NONE = float("nan")
LABELS = {
    "kind": jnp.asarray([0, 2, UNLABELLED, 1, 1, UNLABELLED, 2, 0], jnp.int32),
    "size": jnp.asarray([4.0, NONE, 7.0, 5.5, NONE, NONE, 1.0, 3.0], jnp.float32),
}
HELD = {"kind": [0, 1, 3, 4, 6], "size": [0, 2, 3, 6]}
"""Rows with a label; the last row is padding, and row 5 has no label at all."""


def batch_of(labels=LABELS):
    segments = jnp.ones((B, T), jnp.int32).at[-1].set(0).at[2, 4:].set(0)
    ids = jax.random.randint(KEY, (B, T), 4, 260, jnp.int32)
    return Batch(ids, ids, segments, ids, segments, labels=labels)


def tasks_of(weighting="fixed", kind=1.0, size=1.0):
    return MultiTask((TaskLoss("kind", Classify(), kind), TaskLoss("size", NUMBER, size)), weighting)


def answers_of(s=None):
    outputs = {
        "kind": jax.random.normal(jax.random.key(1), (B, CLASSES), jnp.float32),
        "size": jax.random.normal(jax.random.key(2), (B, 1), jnp.float32),
    }
    if s is None:
        return TaskAnswers(outputs)
    return TaskAnswers(outputs, {name: jnp.float32(value) for name, value in s.items()})


def by_hand(answers):
    """L_kind and L_size, and their gradients by the outputs, from the formulas in NumPy."""
    x = np.asarray(answers.outputs["kind"], np.float64)
    p = np.exp(x - np.logaddexp.reduce(x, 1, keepdims=True))
    asked = np.zeros_like(x)
    for row in HELD["kind"]:
        asked[row, int(LABELS["kind"][row])] = 1
    held = asked.sum(1, keepdims=True)
    nats, by_class = -np.sum(asked * np.log(p)) / 5, held * (p - asked) / 5
    y = np.asarray(answers.outputs["size"], np.float64)[:, 0]
    error = np.zeros(B)
    for row in HELD["size"]:
        error[row] = y[row] - (float(LABELS["size"][row]) - 5) / 2
    return (nats, np.sum(error**2) / 4), {"kind": by_class, "size": 2 * error[:, None] / 4}


def loss_of(objective, answers, batch):
    """As a train step takes it, of the whole batch."""
    batch = objective(KEY, batch)
    return objective.sums(answers, batch)["loss"] / objective.weight(batch)


@pytest.mark.slow(days=28, group="costly")
def test_fixed_weights_sum_the_mean_losses():
    objective, answers = tasks_of(kind=0.25, size=3.0), answers_of()
    (kind, size), slopes = by_hand(answers)
    loss, gradient = jax.jit(jax.value_and_grad(lambda a: loss_of(objective, a, batch_of())))(answers)
    np.testing.assert_allclose(loss, 0.25 * kind + 3 * size, rtol=1e-6)
    np.testing.assert_allclose(gradient.outputs["kind"], 0.25 * slopes["kind"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(gradient.outputs["size"], 3 * slopes["size"], rtol=1e-5, atol=1e-7)
    batch = objective(KEY, batch_of())
    assert float(objective.weight(batch)) == 6
    found = objective.figures(jax.jit(objective.sums)(answers, batch))
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose([found["kind/loss"], found["size/loss"]], [kind, size], rtol=1e-6)
    np.testing.assert_allclose(found["size/rmse"], 2 * np.sqrt(size), rtol=1e-6)
    assert "kind/weight" not in found


def test_smooth_labels_of_one_task():
    """0.9 of the loss by the label and 0.1 of the mean over classes, of the rows that have one."""
    smooth = MultiTask((TaskLoss("kind", Classify(label_smoothing=0.1)), TaskLoss("size", NUMBER)))
    answers, batch = answers_of(), batch_of()
    (kind, size), _ = by_hand(answers)
    x = np.asarray(answers.outputs["kind"], np.float64)[HELD["kind"]]
    evenly = np.mean(np.logaddexp.reduce(x, 1) - x.mean(1))
    found = jax.jit(lambda a: loss_of(smooth, a, batch))(answers)
    np.testing.assert_allclose(found, 0.9 * kind + 0.1 * evenly + size, rtol=1e-6)


def test_uncertainty_weighs_by_learned_variances():
    s = {"kind": 0.7, "size": -1.2}
    objective, answers = tasks_of("uncertainty"), answers_of(s)
    (kind, size), slopes = by_hand(answers)
    loss, gradient = jax.jit(jax.value_and_grad(lambda a: loss_of(objective, a, batch_of())))(answers)
    weights = {"kind": np.exp(-0.7), "size": np.exp(1.2) / 2}
    expected = weights["kind"] * kind + 0.35 + weights["size"] * size - 0.6
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, alone in (("kind", kind), ("size", size)):
        found = gradient.outputs[name]
        np.testing.assert_allclose(found, weights[name] * slopes[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(gradient.log_variances[name], 0.5 - weights[name] * alone, rtol=1e-5)
    batch = objective(KEY, batch_of())
    found = jax.device_get(jax.jit(lambda a: objective.figures(objective.sums(a, batch)))(answers))
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose([found[f"{n}/weight"] for n in weights], list(weights.values()), rtol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="training/objectives/test_task_scores")
@pytest.mark.parametrize("weighting", ["fixed", "uncertainty"])
def test_what_has_no_label_does_not_count(weighting):
    """Answers for empty cells and padding may be anything; a task without labels adds nothing, nor does its s."""
    objective, answers = tasks_of(weighting), answers_of({"kind": 0.1, "size": 0.2})
    outputs = {}
    for name, values in answers.outputs.items():
        rows = jnp.isin(jnp.arange(B), jnp.asarray(HELD[name]))[:, None]
        outputs[name] = jnp.where(rows, values, jnp.float32(1e3))
    other = TaskAnswers(outputs, answers.log_variances)
    batch = objective(KEY, batch_of())
    first, second = objective.sums(answers, batch), objective.sums(other, batch)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    empty = {"kind": LABELS["kind"], "size": jnp.full(B, jnp.nan, jnp.float32)}
    alone = MultiTask((TaskLoss("kind", Classify()),), weighting)
    loss, gradient = jax.value_and_grad(lambda a: loss_of(objective, a, batch_of(empty)))(answers)
    assert float(loss) == float(loss_of(alone, answers, batch_of(empty)))
    assert not np.any(gradient.outputs["size"])
    assert float(gradient.log_variances["size"]) == 0
    nothing = {
        name: empty["size"] if name == "size" else jnp.full(B, UNLABELLED, jnp.int32) for name in LABELS
    }
    assert np.isnan(float(loss_of(objective, answers, batch_of(nothing))))


def test_the_order_of_tasks_changes_nothing():
    s = {"kind": 0.7, "size": -1.2}
    objective = tasks_of("uncertainty")
    turned = replace(objective, tasks=objective.tasks[::-1])
    batch = batch_of()
    first, second = (o.figures(o.sums(answers_of(s), o(KEY, batch))) for o in (objective, turned))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_figures_of_a_split_are_those_of_the_tasks_alone():
    """Summed over batches of which one has no label of a task; ranks included."""
    objective, answers = tasks_of(), answers_of()
    empty = {"kind": LABELS["kind"], "size": jnp.full(B, jnp.nan, jnp.float32)}
    batches, state = (batch_of(), batch_of(empty)), start({}, optax.identity())
    found = Collected()
    for index, batch in enumerate(batches):
        batch = objective(KEY, batch)
        _add(found, index, objective.sums(answers, batch) | {ROWS: objective.rows(answers, batch)}, state)
    figures = found.figures(objective)
    (kind, size), _ = by_hand(answers)
    np.testing.assert_allclose(figures["loss"], kind + size, rtol=1e-6)
    assert figures["bytes"] == 11
    held = jnp.asarray(HELD["size"])
    one = Batch(
        *(batches[0].inputs[held],) * 2, *(jnp.ones((4, T), jnp.int32),) * 3, labels=LABELS["size"][held]
    )
    ranked = NUMBER.ranked(
        {k: np.asarray(v) for k, v in NUMBER.rows(answers.outputs["size"][held], one).items()}
    )
    assert {name: figures[f"size/{name}"] for name in ranked} == ranked
    assert {"kind/mcc", "kind/auroc"} <= figures.keys()
    only = Collected()
    _add(only, 0, objective.sums(answers, objective(KEY, batches[1])), state)
    assert not any(name.startswith("size/") for name in objective.figures(only.totals))


class Small(nn.Module):
    """An embedding under heads."""

    head: LabelHeadConfig | TaskHeadsConfig
    patcher = None
    grid = 1

    @nn.compact
    def __call__(self, ids, *, segment_ids=None, positions=None, entropies=None, patches=None):
        x = nn.Embed(260, 4, name="embed")(ids)
        return self.head.build(True, jnp.float32)(x, ids, segment_ids), None


KIND = LabelHeadConfig(outputs=CLASSES)
SIZE = LabelHeadConfig(target="number", outputs=1)


def stepped(head, objective, batch, params, **options):
    sgd = optax.sgd(0.5)
    step = make_train_step(Task(Small(head), objective), sgd, **options)
    state, metrics = step(start(jax.tree.map(jnp.array, params), sgd), batch)
    return state.params, metrics


@pytest.mark.slow(days=28, group="costly")
def test_micro_batches_equal_the_whole_batch():
    """Labels of a task lie in other numbers in each, and in one of them there is none."""
    head = TaskHeadsConfig((TaskHead("kind", KIND), TaskHead("size", SIZE)), uncertainty=True)
    batch, objective = batch_of(), tasks_of("uncertainty")
    params = drawn(Small(head), batch.inputs)["params"]
    (whole, expected), (parts, found) = (
        stepped(head, objective, batch, params, accumulate=n) for n in (1, 4)
    )
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], **tol(jnp.float32, n=B * T), err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tol(jnp.float32, n=B * T)), parts, whole)
    assert not np.array_equal(whole["TaskHeads_0"]["log_variances"], params["TaskHeads_0"]["log_variances"])


@pytest.mark.parametrize("kind", ["class", "number"])
def test_one_task_of_weight_one_is_bitwise_the_task_alone(kind):
    head, single = (KIND, Classify()) if kind == "class" else (SIZE, NUMBER)
    labels = jnp.asarray([0, 2, 1, 1, 1, 0, 2, 0], jnp.int32 if kind == "class" else jnp.float32)
    batch = batch_of(labels)
    params = drawn(Small(head), batch.inputs)["params"]
    heads = TaskHeadsConfig((TaskHead("one", head),))
    renamed = {"embed": params["embed"], "TaskHeads_0": {"one": params["LabelHead_0"]}}
    named = replace(batch, labels={"one": labels})
    after, expected = stepped(head, single, batch, params)
    found = stepped(heads, MultiTask((TaskLoss("one", single),)), named, renamed)
    back = {"embed": found[0]["embed"], "LabelHead_0": found[0]["TaskHeads_0"]["one"]}
    jax.tree.map(np.testing.assert_array_equal, back, after)
    for name in single.figure_names:
        if name in expected:
            assert float(found[1][f"one/{name}"]) == float(expected[name]), name
    assert float(found[1]["loss"]) == float(expected["loss"])
    assert float(found[1]["scored_bytes"]) == float(expected["scored_bytes"])
