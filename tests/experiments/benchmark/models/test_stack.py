"""The benchmark of a Hyena stack: what it counts, the figures it leaves."""

import json

import jax.numpy as jnp
import pytest

from experiments.benchmark.models import stack
from experiments.benchmark.models.forward_pass import kernel_sizes
from jaxblt.profiling import Ceilings, this_machine


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_stack_figures() -> None:
    ceilings = Ceilings(1e12, 1e12, "float32", this_machine())
    config = stack.stack_config(layers=2, dim=16)
    params = stack.parameters(config)
    # in and out of the operator, and three matrices of the MLP, whose width is rounded up to 64
    assert kernel_sizes(params) == 2 * (4 * 16**2 + 3 * 16 * 64)
    found = stack.forward(config, params, jnp.ones((1, 32, 16), jnp.float32), ceilings, trials=20)
    assert found["tokens_per_second"] == pytest.approx(32 / found["seconds"]["median"])
    assert found["flops"] == 2 * 32 * kernel_sizes(params)
    json.dumps(found)
