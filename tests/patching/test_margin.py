import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.patching import PatcherConfig, boundary_margin, decided, flip_rate
from jaxblt.patching.segment import closes
from tests.patching.rows import random_rows

SIZE = 24
margin_of = jax.jit(boundary_margin, static_argnums=0)
decided_of = jax.jit(decided, static_argnums=0, static_argnames="error")
closes_of = jax.jit(closes, static_argnums=0)


@pytest.fixture(scope="module")
def sample():
    ids, _, segments = random_rows(21, rows=4, blocks=4, block_size=SIZE)
    entropies = np.random.default_rng(1).uniform(0, 5.5, ids.shape).astype(np.float32)
    return ids, entropies, segments


def test_by_hand():
    entropies = jnp.asarray([[5.0, 1.0, 2.5, 3.5]], jnp.float32)
    segments = jnp.asarray([[1, 1, 1, 0]], jnp.int32)
    config = PatcherConfig(threshold=2.0, block_size=4)
    inf = np.inf
    np.testing.assert_allclose(margin_of(config, entropies, segments), [[inf, 1, 0.5, inf]])
    rising = dataclasses.replace(config, monotonic=True)
    np.testing.assert_allclose(margin_of(rising, entropies, segments), [[inf, 3, 0.25, inf]])
    dual = dataclasses.replace(config, threshold_add=1.0)
    np.testing.assert_allclose(margin_of(dual, entropies, segments), [[inf, 2.5, 0.25, inf]])
    greedy = dataclasses.replace(config, mode="greedy")
    np.testing.assert_allclose(margin_of(greedy, entropies, segments), [[3, 1, 0.75, inf]], atol=2.0**-15)
    assert np.isinf(margin_of(PatcherConfig(mode="space", block_size=4), entropies, segments)).all()
    with pytest.raises(ValueError, match="no margin"):
        boundary_margin(PatcherConfig(mode="optimal", threshold=1.0), entropies, segments)


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 3.5},
        {"threshold": 0.5, "monotonic": True},
        {"threshold": 2.0, "threshold_add": 0.25},
        {"mode": "greedy", "threshold": 7.0},
        {"threshold": 3.5, "min_length": 2, "max_length": 5},
    ],
    ids=["entropy", "monotonic", "dual", "greedy", "limits"],
)
def test_errors_smaller_than_the_margin_flip_nothing_and_larger_ones_do(sample, options):
    ids, entropies, segments = sample
    config = PatcherConfig(**options, block_size=SIZE)
    before = closes_of(config, ids, entropies, segments)
    error = 0.02
    sure = np.asarray(decided_of(config, entropies, segments, error=error))
    flips = np.zeros_like(sure)
    for seed in range(20):
        noise = np.random.default_rng(seed).choice(np.float32([-error, error]), entropies.shape)
        after = closes_of(config, ids, np.maximum(entropies + noise, 0), segments)
        flips |= np.asarray(after != before)
    assert flips.any(), "nothing flips, so the check is void"
    assert not (flips & sure).any()
    assert sure[segments > 0].mean() > 0.4


def test_flip_rate_counts_bytes_that_are_not_padding():
    closed = jnp.asarray([[True, False, True, False]])
    other = jnp.asarray([[True, True, True, True]])
    assert float(flip_rate(closed, other, jnp.asarray([[1, 1, 1, 0]]))) == pytest.approx(1 / 3)
    assert float(flip_rate(closed, other, jnp.zeros((1, 4), jnp.int32))) == 0.0
