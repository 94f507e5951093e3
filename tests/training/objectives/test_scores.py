"""Losses and accuracies of objectives, against numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.training.objectives.objectives import Classify, NextByte
from tests.training.tiny import random_batch

BATCH = random_batch(0)


def logits_of(batch, right):
    """Random logits, the target's the largest where `right`."""
    logits = np.random.default_rng(1).normal(size=(*batch.targets.shape, 260)).astype(np.float32)
    best = np.where(right, batch.targets, (np.asarray(batch.targets) + 1) % 260)
    np.put_along_axis(logits, best[..., None], 20.0, -1)
    return jnp.asarray(logits)


def test_label_smoothing_is_that_of_optax_and_leaves_bits_alone():
    plain, smooth = NextByte(), NextByte(label_smoothing=0.1)
    logits = logits_of(BATCH, np.random.default_rng(0).random(BATCH.targets.shape) < 0.5)
    smoothed = lambda x, y: optax.softmax_cross_entropy(x, optax.smooth_labels(y, 0.1))  # noqa: E731
    each = np.asarray(jax.jit(smoothed)(logits, np.eye(260, dtype=np.float32)[BATCH.targets]))
    mask = np.asarray(BATCH.loss_mask, np.float32)
    found = jax.jit(lambda x: smooth.figures(smooth.sums(x, BATCH)))(logits)
    np.testing.assert_allclose(found["loss"], (each * mask).sum() / mask.sum(), rtol=1e-5)
    before = jax.jit(lambda x: plain.figures(plain.sums(x, BATCH)))(logits)
    np.testing.assert_allclose(found["bits_per_byte"], before["loss"] / math.log(2), rtol=1e-6)
    assert float(found["loss"]) != float(before["loss"])


def test_accuracy_counts_scored_ids_and_whole_rows():
    scored = np.asarray(BATCH.loss_mask) > 0
    right = np.ones(scored.shape, bool)
    right[~scored] = False
    right[1, np.flatnonzero(scored[1])[:3]] = False
    batch = BATCH.replace(loss_mask=BATCH.loss_mask.at[2].set(0))
    scored = np.asarray(batch.loss_mask) > 0
    objective = NextByte(accuracy=True)
    found = objective.figures(objective.sums(logits_of(batch, right), batch))
    np.testing.assert_allclose(found["accuracy"], 1 - 3 / scored.sum(), rtol=1e-6)
    np.testing.assert_allclose(found["row_accuracy"], 2 / 3, rtol=1e-6)
    assert objective.headline == "accuracy"


def test_classes_of_rows():
    labels = jnp.asarray([0, 2, 1, 1], jnp.int32)
    batch = BATCH.replace(labels=labels, segment_ids=BATCH.segment_ids.at[3].set(0))
    logits = jnp.asarray(np.eye(3, dtype=np.float32)[[0, 2, 0, 0]] * 5)
    objective = Classify()
    found = objective.figures(objective.sums(logits, objective(jax.random.key(0), batch)))
    assert float(found["accuracy"]) == pytest.approx(2 / 3)
    nats = -np.log(np.exp([5.0, 5.0, 0.0]) / (math.exp(5) + 2))
    assert float(found["loss"]) == pytest.approx(nats.mean(), rel=1e-5)
    with pytest.raises(ValueError, match=r"needs batch\.labels"):
        objective(jax.random.key(0), dataclasses.replace(batch, labels=None))
