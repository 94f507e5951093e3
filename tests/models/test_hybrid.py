"""Stacks of unlike mixers: every part moves the output and has a gradient."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    GRUConfig,
    Mamba2Config,
    NTMConfig,
    StateEngineConfig,
)
from jaxblt.models import Stack, StackConfig

HYBRID = StackConfig(
    dim=8,
    num_layers=4,
    pattern="ATNU",
    mixers={
        "A": AttentionConfig(dim=8, num_heads=2),
        "T": StateEngineConfig(dim=8, num_heads=2, num_slots=5, interval=4, cell="linear", chunk_size=4),
        "N": NTMConfig(dim=8, num_heads=1, slots=4, width=3),
        "U": GRUConfig(dim=8, num_heads=2),
    },
    mlp_dim=0,
    scan=False,
)
DELTA = StackConfig(
    dim=8,
    num_layers=4,
    pattern="DDDW",
    mixers={
        "D": GatedDeltaNetConfig(dim=8, num_heads=2, chunk_size=4),
        "W": AttentionConfig(dim=8, num_heads=4, num_kv_heads=2, window=5),
    },
    mlp_dim=0,
    scan=False,
)
MEMORIES = replace(
    HYBRID,
    pattern="A2NU",
    mixers={**HYBRID.mixers, "2": Mamba2Config(dim=8, head_dim=4, state_dim=4, chunk_size=4)},
)


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("config", [HYBRID, DELTA, MEMORIES], ids=lambda config: config.pattern)
def test_every_part_of_a_hybrid_moves_the_output_and_has_a_gradient(config: StackConfig) -> None:
    stack, x = Stack(config), jax.random.normal(jax.random.key(0), (2, 12, 8))
    params = nn.meta.unbox(jax.jit(stack.init)(jax.random.key(1), x))["params"]
    dy = jax.random.normal(jax.random.key(2), x.shape)

    @jax.jit
    def passes(params: Any) -> Any:
        y, back = jax.vjp(lambda p: stack.apply({"params": p}, x)[0], params)
        return y, back(dy)[0]

    y, gradient = passes(params)
    for leaf in jax.tree.leaves(gradient):
        assert np.any(np.asarray(leaf))
    period = params["period_0"]
    for name, block in period.items():
        still = {**period, name: {**block, "mixer": jax.tree.map(jnp.zeros_like, block["mixer"])}}
        other, _ = passes(params | {"period_0": still})
        assert float(jnp.max(jnp.abs(other - y))) > 1e-3, name
