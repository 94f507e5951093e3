"""The benchmark's gate, and the work it counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._bench import check
from pallas_kernels.attention import bench, masks
from pallas_kernels.attention.shapes import AttentionShape

TINY = AttentionShape("tiny", 2, 40, 4, 2, 8)
SHAPES = (
    TINY,
    dataclasses.replace(TINY, window=7),
    dataclasses.replace(TINY, documents=5),
    dataclasses.replace(TINY, documents=5, window=7),
    dataclasses.replace(TINY, causal=False, documents=3),
)


@pytest.mark.parametrize("shape", SHAPES)
def test_pairs_are_those_of_the_mask(shape):
    ids = jnp.asarray(bench.segment_ids(shape))
    assert len(set(ids[0].tolist())) == shape.documents
    seen = (masks.band(shape.causal, shape.window) & masks.documents(ids)).dense(shape.tokens, shape.tokens)
    assert bench.visible_pairs(shape) == int(seen.sum())


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_bench")
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2]])
def test_the_gate(shape):
    errors = check(bench.plan(shape), jax.random.key(0))
    assert set(errors) == {"xla", "reference"}
    assert 0 < errors["xla"] < 0.01


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_a_wrong_version_does_not_pass():
    plan = bench.plan(TINY)
    (dense,) = plan.versions
    wrong = dataclasses.replace(dense, fn=lambda q, k, v: 1.1 * dense.fn(q, k, v))
    with pytest.raises(ArithmeticError, match="reference"):
        check(dataclasses.replace(plan, versions=[wrong]), jax.random.key(0))


def test_two_sided_windows_are_refused():
    with pytest.raises(ValueError, match="'tiny' causal"):
        bench.visible_pairs(dataclasses.replace(TINY, causal=False, window=3))
