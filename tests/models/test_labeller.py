"""Heads for labels: pooled over a record's bytes and nothing else, on every model through the same protocol."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import BOS, PAD
from jaxblt.models import LabelHeadConfig, LabellerConfig
from jaxblt.models.label_head import LabelHead
from jaxblt.models.pooling import AttentionPool, pool
from tests.answers.runs import BYTES, PATCHER, PATCHES
from tests.compiled import compiled_once_and_quickly
from tests.parameters import drawn


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(compiled):
    with compiled_once_and_quickly(compiled):
        yield


ROWS, LENGTH, WIDTH = 3, 12, 5
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32))
THERE = np.zeros((ROWS, LENGTH), bool)
THERE[0, 1:8], THERE[1, [1, 2, 5, 9]] = True, True


def textbook(x, there, pooling, query=None):
    rows = []
    for row, mask in zip(np.asarray(x, np.float64), there, strict=True):
        kept = row[mask]
        if not len(kept):
            rows.append(np.zeros(x.shape[-1]))
        elif pooling == "attention":
            weights = np.exp(kept @ query / np.sqrt(x.shape[-1]))
            rows.append(weights @ kept / weights.sum())
        else:
            rows.append(
                {"mean": kept.mean(0), "max": kept.max(0), "first": kept[0], "last": kept[-1]}[pooling]
            )
    return np.stack(rows)


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize("pooling", ["mean", "max", "first", "last", "attention"])
def test_pools_what_is_there_and_nothing_else(pooling):
    there, noise = jnp.asarray(THERE), jnp.where(jnp.asarray(THERE)[..., None], X, jnp.inf)
    query = np.random.default_rng(1).normal(size=WIDTH).astype(np.float32)
    if pooling == "attention":
        module = AttentionPool()
        found = module.apply({"params": {"query": jnp.asarray(query)}}, X, there)
        noise = jnp.where(there[..., None], X, 1e3)
        again = module.apply({"params": {"query": jnp.asarray(query)}}, noise, there)
    else:
        found, again = pool(X, there, pooling), pool(noise, there, pooling)
    np.testing.assert_allclose(found, textbook(X, THERE, pooling, query), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(found, again)
    gradient = jax.grad(lambda x: jnp.sum(pool(x, there, pooling)))(X) if pooling != "attention" else X
    assert np.isfinite(gradient).all()


def rows_of(lengths, width):
    """BOS and random bytes, then padding."""
    rng = np.random.default_rng(3)
    ids = np.full((len(lengths), width), PAD, np.int32)
    segments = np.zeros(ids.shape, np.int32)
    for row, segment, length in zip(ids, segments, lengths, strict=True):
        row[0], row[1 : length + 1] = BOS, rng.integers(4, 260, length)
        segment[: length + 1] = 1
    return jnp.asarray(ids), jnp.asarray(segments)


@pytest.mark.slow(days=28, group="stacks and labels")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["cls", "mean", "max", "attention"])
def test_neither_padding_nor_holes_nor_bos_are_pooled(name, causal):
    head = LabelHead(LabelHeadConfig(pool=name, outputs=3), causal)
    ids, segments = rows_of((7, 4), LENGTH)
    x = X[:2]
    params = drawn(head, x, ids, segments)
    found = head.apply(params, x, ids, segments)
    outside = np.asarray(segments) == 0
    if name != "cls" or causal:
        outside[:, 0] = True  # BOS
    noise = jnp.where(jnp.asarray(outside)[..., None], 7.0, x)
    np.testing.assert_array_equal(found, head.apply(params, noise, ids, segments))
    # a hole in the middle: the same states with one more between them
    at = jnp.asarray([0, 1, 2, 2, *range(3, LENGTH - 1)])
    holed = segments[:, at].at[:, 2].multiply(-1)
    spread = x[:, at].at[:, 2].set(9.0)
    np.testing.assert_allclose(head.apply(params, spread, ids[:, at], holed), found, rtol=1e-6, atol=1e-6)
    moved = x.at[:, 2].add(1.0)
    assert (name == "cls") == np.allclose(head.apply(params, moved, ids, segments), found)


@pytest.mark.slow(days=28, group="costly", turn="models/test_labeller")
@pytest.mark.parametrize("name", ["bytes", "patches"])
def test_a_base_keeps_its_parameters_names_and_padding_changes_nothing(name):
    config = {"bytes": BYTES, "patches": PATCHES}[name]
    patcher = None if name == "bytes" else replace(PATCHER, mode="static", threshold=None, patch_size=4)
    labeller = LabellerConfig(config, LabelHeadConfig(outputs=3)).build(patcher=patcher)
    ids, segments = rows_of((20, 13), 32)
    params = drawn(labeller, ids)
    base = jax.eval_shape(config.build(patcher=patcher).init, jax.random.key(0), ids)["params"]
    new = set(params["params"]) - set(base)
    assert new == {"label_head"}
    assert set(base) == set(params["params"]) - new
    apply = jax.jit(labeller.apply)
    found, patches = apply(params, ids, segment_ids=segments)
    assert found.shape == (2, 3)
    assert (patches is None) == (name == "bytes")
    # padding holds other ids, and less of it is there
    other = jnp.where(segments > 0, ids, 77)
    np.testing.assert_array_equal(apply(params, other, segment_ids=segments)[0], found)
    hidden = partial(labeller.apply, method=lambda m, *a, **k: m.base.hidden(*a, **k))
    states, _ = jax.eval_shape(hidden, params, ids, segment_ids=segments)
    assert states.shape == (2, 32, 16)
    assert labeller.stacks.keys() == config.build(patcher=patcher).stacks.keys()
    with pytest.raises(ValueError, match="a Labeller predicts labels and cannot generate"):
        labeller.init_state(1, num_bytes=4)


def test_positions_have_an_answer_each():
    head = LabelHead(LabelHeadConfig(target="positions", outputs=4), causal=True)
    ids, segments = rows_of((7, 4), LENGTH)
    assert head.apply(drawn(head, X[:2], ids, segments), X[:2], ids, segments).shape == (2, LENGTH, 4)
