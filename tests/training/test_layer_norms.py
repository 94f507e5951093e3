"""Norms of gradients by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.training.metrics import layer_norms
from jaxblt.training.state import start
from jaxblt.training.step import make_train_step
from tests.training.test_step import build
from tests.training.tiny import TinyConfig, random_batch


@pytest.mark.slow(days=28, group="costly")
def test_norms_are_of_blocks_and_periods_and_make_up_the_whole() -> None:
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    block = {"mixer": {"out": {"kernel": drawn(3, 4, 5)}}, "norm": {"scale": drawn(3, 4)}}
    grads = {
        "embedding": {"bytes": {"embedding": drawn(7, 4)}},
        "stack": {"periods": {"block_0": block}, "rest": {"block_0": {"scale": drawn(4)}}},
    }
    found = layer_norms(grads)
    assert set(found) == {
        "grad_norm/embedding",
        "grad_norm/stack/periods/block_0",
        "grad_norm/stack/rest/block_0",
    }
    by_period = found["grad_norm/stack/periods/block_0"]
    np.testing.assert_allclose(by_period[1], optax.tree.norm(jax.tree.map(lambda x: x[1], block)), rtol=1e-6)
    whole = np.sqrt(sum(np.sum(np.square(x)) for x in found.values()))
    np.testing.assert_allclose(whole, optax.tree.norm(grads), rtol=1e-6)
    grads["stack"]["rest"]["block_0"]["scale"] = drawn(4).at[2].set(jnp.nan)
    broken = [name for name, norm in layer_norms(grads).items() if not np.isfinite(norm).all()]
    assert broken == ["grad_norm/stack/rest/block_0"]


def test_a_step_reports_them_on_request_alone() -> None:
    task, optimizer, params = build(TinyConfig())
    for asked in (False, True):
        step = make_train_step(task, optimizer, layer_norms=asked)
        _, metrics = jax.eval_shape(step, start(params, optimizer), random_batch(0))
        assert ("grad_norm/head" in metrics) == asked
