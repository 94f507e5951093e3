"""Figures of labels against scikit-learn and SciPy, summed over batches of which one is short of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from sklearn import metrics

from jaxblt.data.batch import Batch
from jaxblt.training.evaluate import ROWS as GATHERED
from jaxblt.training.evaluate import Collected, _add
from jaxblt.training.objectives.objectives import Classify, ClassifyPositions, NextByte, Regress
from jaxblt.training.state import start

PARTS, ROWS, LENGTH = 3, 40, 4


def batch_of(labels, held):
    segments = jnp.broadcast_to(jnp.asarray(held, jnp.int32)[:, None], (len(held), LENGTH))
    ids = jnp.full(segments.shape, 9, jnp.int32)
    return Batch(ids, ids, segments, ids, segments, labels=jnp.asarray(labels))


def figures_of(objective, logits, batches):
    """As an evaluation makes them, batch by batch."""
    found, state = Collected(), start({}, optax.identity())
    step = jax.jit(lambda x, batch: {**objective.sums(x, batch), GATHERED: rows_of(objective, x, batch)})
    for index, (x, batch) in enumerate(zip(logits, batches, strict=True)):
        _add(found, index, step(jnp.asarray(x), batch), state)
    return found.figures(objective)


def rows_of(objective, x, batch):
    return objective.rows(x, batch) if hasattr(objective, "rows") else {}


def random_classes(classes, seed=0):
    """Labels that the logits know something of, in batches of which the last is short; of two classes with ties."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(classes, (PARTS, ROWS), p=np.arange(1, classes + 1) / (classes * (classes + 1) / 2))
    logits = rng.normal(size=(PARTS, ROWS, classes)) + 1.5 * np.eye(classes)[labels]
    if classes == 2:
        logits[:, ::5] = np.round(logits[:, ::5])
    held = np.ones((PARTS, ROWS), bool)
    held[-1, 25:] = False
    return labels.astype(np.int32), logits.astype(np.float32), held


@pytest.mark.parametrize("classes", [2, 4])
def test_figures_of_classes_are_those_of_scikit_learn(classes):
    labels, logits, held = random_classes(classes)
    found = figures_of(Classify(), logits, [batch_of(*both) for both in zip(labels, held, strict=True)])
    y, x = labels[held], logits[held].astype(np.float64)
    p, best = np.exp(x - np.logaddexp.reduce(x, 1, keepdims=True)), x.argmax(1)
    expected = {
        "bytes": held.sum(),
        "loss": metrics.log_loss(y, p),
        "accuracy": metrics.accuracy_score(y, best),
        "mcc": metrics.matthews_corrcoef(y, best),
        "f1": metrics.f1_score(y, best, average="macro"),
    }
    if classes == 2:
        margin = x[:, 1] - x[:, 0]
        expected |= {
            "auroc": metrics.roc_auc_score(y, margin),
            "auprc": metrics.average_precision_score(y, margin),
        }
    else:
        expected["auroc"] = metrics.roc_auc_score(y, p, multi_class="ovr")
        expected["auprc"] = metrics.average_precision_score(np.eye(classes)[y], p, average="macro")
    assert found == pytest.approx(expected, rel=2e-6)
    # a train step makes the same of one batch, in fp32 and without ranks
    first = batch_of(labels[0], held[0])
    traced = jax.jit(lambda x: Classify().figures(Classify().sums(x, first)))(jnp.asarray(logits[0]))
    assert float(traced["mcc"]) == pytest.approx(
        metrics.matthews_corrcoef(labels[0], logits[0].argmax(1)), rel=1e-5
    )


@pytest.mark.slow(days=28, group="costly")
def test_smooth_labels_are_those_of_optax_and_leave_other_figures_alone():
    """Labels 1 and 0 of the logits ln 2, ln 1, ln 1 have p = 1/4 and 1/2; a third row holds nothing."""
    logits = jnp.log(jnp.array([[2.0, 1.0, 1.0]] * 3))
    batch = batch_of(np.array([1, 0, 2], np.int32), np.array([True, True, False]))
    plain, smooth = Classify(), Classify(label_smoothing=0.1)
    soft = optax.smooth_labels(jax.nn.one_hot(batch.labels, 3), 0.1)
    losses = np.asarray(jax.jit(smooth.losses)(logits, batch))
    np.testing.assert_allclose(losses, optax.softmax_cross_entropy(logits, soft), rtol=1e-6)
    np.testing.assert_allclose(losses[:2], [1.3631894, 0.7393569], rtol=1e-6)
    found, before = (one.figures(jax.jit(one.sums)(logits, batch)) for one in (smooth, plain))
    assert float(found.pop("loss")) == pytest.approx(1.0512732, rel=1e-6)
    assert float(before.pop("loss")) == pytest.approx(1.0397208, rel=1e-6)
    assert found == before


def test_figures_where_they_are_not_defined():
    """Every row of one class, and a class that nobody predicts or has."""
    logits = np.zeros((1, 6, 3), np.float32)
    logits[..., 0] = 1
    found = figures_of(Classify(), logits, [batch_of(np.zeros(6, np.int32), np.ones(6, bool))])
    assert (found["accuracy"], found["mcc"], found["f1"]) == (1.0, 0.0, 1.0)
    assert "auroc" not in found
    y, best = [0, 0, 0, 2, 2, 2], [0] * 6
    found = figures_of(Classify(), logits, [batch_of(np.array(y, np.int32), np.ones(6, bool))])
    assert found["mcc"] == metrics.matthews_corrcoef(y, best) == 0
    assert found["f1"] == pytest.approx(metrics.f1_score(y, best, average="macro"))
    assert found["auroc"] == 0.5


def test_figures_of_positions_count_labelled_ones():
    labels, logits, _ = random_classes(3)
    labels[0, 3:9] = -1
    labels, logits = labels.reshape(PARTS, -1, LENGTH), logits.reshape(PARTS, -1, LENGTH, 3)
    objective = ClassifyPositions()
    batches = [batch_of(part, np.ones(len(part), bool)) for part in labels]
    found = figures_of(objective, logits, batches)
    asked = labels >= 0
    y, best = labels[asked], logits[asked].argmax(-1)
    expected = {
        "bytes": asked.sum(),
        "accuracy": metrics.accuracy_score(y, best),
        "mcc": metrics.matthews_corrcoef(y, best),
        "f1": metrics.f1_score(y, best, average="macro"),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-6)
    assert float(objective.weight(batches[0])) == asked[0].sum()


def asked_of(name):
    """Objective, logits, batch, and optax's loss of each answer with what it weighs, for one of a model's heads."""
    classes = 5 if name != "next byte" else 260
    rng = np.random.default_rng(3)
    shape = (ROWS,) if name in ("row", "number") else (ROWS, LENGTH)
    labels = rng.integers(0, classes, shape).astype(np.int32)
    logits = jnp.asarray(rng.normal(size=(*shape, classes)), jnp.float32)
    held = np.arange(ROWS) < 25
    if name == "number":
        numbers, batch = logits[:, :1], batch_of((3 + 2 * labels).astype(np.float32), held)
        return (
            Regress(center=3.0, scale=2.0),
            numbers,
            batch,
            lambda x: 2 * optax.l2_loss(x[:, 0], labels.astype(np.float32)),
            held,
        )
    if name == "position":
        labels[:, 1] = -1
    batch, weights = batch_of(labels, held), held if name == "row" else (held[:, None] & (labels >= 0))
    objective = {"row": Classify, "position": ClassifyPositions, "next byte": NextByte}[name]()
    safe = np.maximum(labels, 0)
    each = lambda x: optax.softmax_cross_entropy_with_integer_labels(x, safe)  # noqa: E731
    return objective, logits, batch.replace(targets=jnp.asarray(safe)), each, weights


@pytest.mark.parametrize("name", ["next byte", "row", "position", "number"])
def test_losses_of_heads_and_their_gradients_are_those_of_optax(name):
    objective, logits, batch, each, weights = asked_of(name)
    weights = weights.astype(np.float32)

    def ours(x):
        return objective.figures(objective.sums(x, batch))["loss"]

    def theirs(x):
        return jnp.sum(each(x) * weights) / weights.sum()

    found, expected = jax.jit(lambda x: [jax.value_and_grad(f)(x) for f in (ours, theirs)])(logits)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-8)
    assert np.any(expected[1])


def test_figures_of_numbers_are_those_of_scipy():
    rng = np.random.default_rng(2)
    labels = rng.normal(50, 7, (PARTS, ROWS)).astype(np.float32)
    answers = (labels - 50) / 7 + rng.normal(size=labels.shape).astype(np.float32)
    answers[:, ::7] = np.round(answers[:, ::7])
    held = np.ones((PARTS, ROWS), bool)
    held[-1, 30:] = False
    objective = Regress(center=50.0, scale=7.0)
    batches = [batch_of(*both) for both in zip(labels, held, strict=True)]
    found = figures_of(objective, answers[..., None], batches)
    y, x = labels[held].astype(np.float64), answers[held].astype(np.float64) * 7 + 50
    expected = {
        "bytes": held.sum(),
        "loss": np.mean((x - y) ** 2) / 49,
        "rmse": metrics.root_mean_squared_error(y, x),
        "pearson": stats.pearsonr(x, y)[0],
        "spearman": stats.spearmanr(x, y)[0],
    }
    assert found == pytest.approx(expected, rel=1e-5)
    assert not objective.higher_is_better
    same = figures_of(objective, np.zeros((1, ROWS, 1), np.float32), batches[:1])
    assert "pearson" not in same
