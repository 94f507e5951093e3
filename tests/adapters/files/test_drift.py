"""What rounding merged weights to bfloat16 does to the update of each product."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, attach, describe_drift, fuse, merge_drift
from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import ByteLMConfig, StackConfig
from tests.parameters import drawn

SHORT = HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))
STACK = StackConfig(dim=8, num_layers=2, pattern="S", mixers={"S": SHORT}, mlp_dim=12)
CONFIG = attach(ByteLMConfig(stack=STACK), AdapterConfig(sites=("mixer/out", "mlp/down"), rank=2, alpha=2.0))
OUT, DOWN = "stack/periods/block_0/mixer/out", "stack/periods/block_0/mlp/down"


def with_updates(out, down):
    """Parameters whose updates are drawn, times these factors."""
    params = drawn(CONFIG.build(), jnp.zeros((1, 8), jnp.int32))["params"]
    block = params["stack"]["periods"]["block_0"]
    for site, factor in ((block["mixer"]["out"], out), (block["mlp"]["down"], down)):
        site["adapter"]["u"] = site["adapter"]["u"] * factor
    return params


def test_it_is_that_of_the_weights():
    params = with_updates(0.1, 1e-6)
    merged = fuse(CONFIG, params)[1]
    found = merge_drift(params, merged)
    assert found.keys() == {OUT, DOWN}
    before, after = (
        tree["stack"]["periods"]["block_0"]["mixer"]["out"]["kernel"] for tree in (params, merged)
    )
    update = np.asarray(after, np.float64) - np.asarray(before, np.float64)
    rounded = [np.asarray(x).astype(jnp.bfloat16).astype(np.float64) for x in (after, before)]
    expected = np.linalg.norm(rounded[0] - rounded[1] - update) / np.linalg.norm(update)
    assert found[OUT] == pytest.approx(expected, rel=1e-3)
    assert 1e-4 < expected < 0.1
    assert found[DOWN] > 0.9  # below half a step of bfloat16 nothing is left of it, or a whole step
    mean, worst = (found[OUT] + found[DOWN]) / 2, found[DOWN]
    words = f"rounded to bfloat16: {mean:.2%} off in the mean, {worst:.2%} at {DOWN}"
    assert describe_drift(found) == f"updates of 2 products, merged and {words}"


def test_an_update_of_zero_is_not_off():
    params = with_updates(0.0, 0.0)
    assert set(merge_drift(params, fuse(CONFIG, params)[1]).values()) == {0.0}
