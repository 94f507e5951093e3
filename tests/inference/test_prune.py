"""Pruning: exact counts of zeros, the least magnitudes, and a curve that begins at the run's own figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxblt.data import BytesSource
from jaxblt.inference.prune import prune, pruning_curve, sparsity
from tests.answers.runs import BYTES, make_run

PARAMS = {
    "a": {"kernel": jnp.asarray([[1.0, -2.0], [3.0, -4.0]]), "bias": jnp.asarray([0.1, 0.2])},
    "b": {"kernel": jnp.asarray([[0.5, 0.5, -5.0]])},
    "norm": {"scale": jnp.asarray([0.01])},
}


def test_the_least_weights_become_0_and_ties_go_by_place():
    found = prune(PARAMS, 2 / 7)
    np.testing.assert_array_equal(found["b"]["kernel"], [[0, 0, -5]])
    np.testing.assert_array_equal(found["a"]["kernel"], PARAMS["a"]["kernel"])
    np.testing.assert_array_equal(prune(PARAMS, 1 / 7)["b"]["kernel"], [[0, 0.5, -5]])
    each = prune(PARAMS, 0.5, over="matrix")
    np.testing.assert_array_equal(each["a"]["kernel"], [[0, 0], [3, -4]])
    np.testing.assert_array_equal(each["b"]["kernel"], [[0, 0, -5]])
    assert each["a"]["bias"] is PARAMS["a"]["bias"]
    assert [sparsity(prune(PARAMS, share)) for share in (0, 3 / 7, 1)] == [0, 3 / 7, 1]


@pytest.mark.slow(days=28, group="costly", turn="inference/test_prune")
def test_a_curve_begins_at_the_runs_own_figures():
    run = make_run(BYTES)
    n = sum(x.size for name, x in flatten_dict(run.params).items() if name[-1] == "kernel" and x.ndim > 1)
    texts = BytesSource([bytes(np.random.default_rng(0).integers(97, 123, 60).astype(np.uint8))] * 40)
    rows = pruning_curve(run, (0.0, 0.33, 1.0), split="train", source=texts, max_batches=1)
    assert [row["sparsity"] for row in rows] == [0, round(0.33 * n) / n, 1]
    assert rows[0]["loss"] == run.evaluate("train", source=texts, max_batches=1)["loss"]
    assert len({row["loss"] for row in rows}) == 3
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(prune(run.params, 0.5)))


def test_bad_shares_are_named():
    with pytest.raises(ValueError, match=r"share of weights to prune must be from 0 to 1, got 1\.5"):
        prune(PARAMS, 1.5)
    with pytest.raises(ValueError, match="there is no weight to prune"):
        prune({"norm": {"scale": jnp.ones(3)}}, 0.5)
