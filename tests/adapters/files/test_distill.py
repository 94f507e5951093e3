"""A routed adapter as a static one: the mean of its updates, at its own rank and at a smaller one."""

import dataclasses
import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Governor,
    RouterConfig,
    attach,
    detach,
    distill,
    fuse,
    mean_codes,
    split_params,
)
from jaxblt.adapters.code.router import Router
from jaxblt.models import ByteLMConfig, StackConfig
from tests.adapters.routing import TURNS
from tests.parameters import drawn

STACK = StackConfig(dim=8, num_layers=2, pattern=("recurrence",), mlp_dim=12)
BANK = AdapterConfig(
    sites=("mlp/*",),
    rank=4,
    blocks=2,
    router=RouterConfig(level="token", chunk=4, reads=(ChunkMean(),), hidden=4),
    governor=Governor(norm="spectral", start=1.0),
)
CODE = jnp.asarray([0.3, 0.6])


@pytest.fixture(scope="module")
def routed():
    config = attach(ByteLMConfig(stack=STACK), BANK)
    return config, drawn(config.build(), jnp.zeros((1, 8), jnp.int32))["params"]


def kernels(params):
    block = params["stack"]["periods"]["block_0"]["mlp"]
    return {name: np.asarray(block[name]["kernel"], np.float64) for name in block}


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_distill")
def test_the_static_adapter_is_the_update_at_the_mean_code(routed):
    config, params = routed
    base, merged = kernels(params), kernels(fuse(config, params, code=CODE)[1])
    for rank in (None, 2):
        plain, static = distill(config, params, CODE, rank=rank)
        assert plain.stack.adapter.router is None
        assert detach(plain) == detach(config)
        made = jax.eval_shape(plain.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        assert jax.tree.map(jnp.shape, nn.meta.unbox(made)) == jax.tree.map(jnp.shape, static)
        found = kernels(fuse(plain, static)[1])
        for name, kernel in base.items():
            for layer in range(2):
                update, wanted = (k[name][layer] - kernel[layer] for k in (found, merged))
                sizes = np.linalg.svd(wanted)[1]
                lost = np.sqrt((sizes[rank:] ** 2).sum()) if rank else 0.0
                np.testing.assert_allclose(np.linalg.norm(update - wanted), lost, rtol=1e-3, atol=1e-5)
                assert sizes[2] > 1e-3


@TURNS
def test_a_static_adapter_at_the_mean_code_of_tokens_diverges_little_from_the_routed_one(routed):
    """Its merged weights are the routed one's at that code, and the base's predictions are far."""
    config, params = routed
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 12)), jnp.int32)
    segments = jnp.asarray([[1] * 12, [1] * 3 + [2] * 5 + [0] * 4], jnp.int32)
    keep = lambda module, method: isinstance(module, Router) and method == "__call__"  # noqa: E731
    apply = partial(config.build().apply, capture_intermediates=keep, mutable=["metrics", "intermediates"])
    _, side = jax.jit(apply)({"params": params}, ids, segment_ids=segments)
    codes = np.asarray(side["intermediates"]["stack"]["router"]["__call__"][0][0])
    found = mean_codes(side)
    np.testing.assert_allclose(found["stack"], codes[np.asarray(segments) > 0].mean(0), rtol=1e-5)
    plain, static = distill(config, params, found)
    assert plain.stack.adapter.rank == 4
    fused = kernels(fuse(plain, static)[1]), kernels(fuse(config, params, code=found["stack"])[1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *fused)
    wanted, distilled, base = (
        jax.nn.log_softmax(made.build().apply({"params": tree}, ids, segment_ids=segments)[0])
        for made, tree in ((config, params), (plain, static), (detach(config), split_params(params)[0]))
    )
    kl = [np.asarray(jnp.sum(jnp.exp(wanted) * (wanted - other), -1)) for other in (distilled, base)]
    far, from_base = (each[np.asarray(segments) > 0].mean() for each in kl)
    assert 0 < far < 0.1 * from_base


def test_what_cannot_be_distilled(routed):
    config, params = routed
    with pytest.raises(ValueError, match="has no routed adapter to distil"):
        distill(detach(config), params, CODE)
    with pytest.raises(
        ValueError, match=re.escape("rank must lie in 1..4, the smallest rank of the sites of 'stack', got 5")
    ):
        distill(config, params, CODE, rank=5)
    with pytest.raises(ValueError, match="give code, 2 numbers"):
        distill(config, params, {"latent": CODE})
    with pytest.raises(ValueError, match="no parameters of it: load them first"):
        distill(config, {"stack": {}}, CODE)
    assert dataclasses.is_dataclass(config)
