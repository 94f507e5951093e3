"""Positions before chosen blocks: where they enter, how often, and the same values token by token."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import GatedRecurrenceConfig
from jaxblt.models import Stack, StackConfig, init_stack_state, with_positions
from jaxblt.models.position_layers import PositionLayer, PositionLayerConfig
from tests.parameters import drawn
from tests.tolerances import tol

BASE = StackConfig(
    dim=8, num_layers=4, pattern=("r",), mlp_dim=16, mixers={"r": GatedRecurrenceConfig(dim=8)}, scan=False
)


def test_patterns_and_calls() -> None:
    """All blocks, every second, first and last; the shortest period, so that scans stay short."""
    made = {layers: with_positions(BASE, layers) for layers in ("all", 2, "ends")}
    assert made["all"].pattern == ("positions", "r")
    assert made[2].pattern == ("positions", "r", "r")
    assert made["ends"].pattern == ("positions", "r", "r", "r")  # and "positions", "r" of the next period
    for layers, calls in (("all", 4), (2, 2), ("ends", 2)):
        counted = []

        def count(run, args, kwargs, context, counted=counted):
            if isinstance(context.module, PositionLayer) and context.method_name == "__call__":
                counted.append(context.module.path)
            return run(*args, **kwargs)

        with nn.intercept_methods(count):
            jax.eval_shape(Stack(made[layers]).init, jax.random.key(0), jnp.zeros((1, 5, 8)))
        assert len(counted) == calls
        assert made[layers].num_layers == 4 + calls
    with pytest.raises(ValueError, match="the stack has positions already"):
        with_positions(made["all"], 2)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        with_positions(BASE, 0)


@pytest.mark.slow(days=28, group="costly")
def test_a_layer_adds_waves_of_the_place_in_the_document() -> None:
    config = PositionLayerConfig(dim=4, periods=(3, 7))
    layer = config.build()
    segments = jnp.asarray([[1] * 5 + [2] * 4 + [0]])
    x = jnp.ones((1, 10, 4))
    params = jax.jit(layer.init)(jax.random.key(0), x)
    kernel = np.asarray(jax.tree.leaves(nn.meta.unbox(params))[0])
    found, _ = jax.jit(layer.apply)(nn.meta.unbox(params), x, segment_ids=segments)
    place = np.array([*range(5), *range(4)])[:, None]
    angle = 2 * np.pi * place / np.array([[3, 7]])
    want = np.concatenate([np.sin(angle), np.cos(angle)], 1) @ kernel
    np.testing.assert_allclose(found[0, :9], want, **tol(jnp.float32, 8))


@pytest.mark.slow(days=28, group="decoding")
def test_token_by_token_equals_the_whole_row() -> None:
    config = with_positions(BASE, 2)
    stack = Stack(config)
    x = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)
    segments = np.array([[1] * 9, [1] * 4 + [2] * 5], np.int32)
    params = {"params": drawn(stack, x)["params"]}
    whole, _ = jax.jit(stack.apply)(params, x, segment_ids=segments)
    step, state = jax.jit(partial(stack.apply)), init_stack_state(config, 2, capacity=16)
    for t in range(9):
        y, state = step(params, x[:, t : t + 1], segment_ids=segments[:, t : t + 1], state=state)
        np.testing.assert_allclose(y[:, 0], whole[:, t], **tol(jnp.float32, 64))
