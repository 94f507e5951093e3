"""Lion, Adafactor and Muon: a step by their papers' formulas, what their states hold, and a loss that falls."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxblt.parallel import make_mesh
from jaxblt.parallel.rules import state_shardings
from jaxblt.training.optimisers.adamw import OptimizerConfig, make_optimizer
from jaxblt.training.optimisers.by_optax import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    muon_axes,
)
from jaxblt.training.stored.serialize import from_json, to_json
from tests.training.optimisers.test_adamw import PARAMS, boxed

SHORT = {"warmup_steps": 2}
CONFIGS = (
    AdamWConfig(**SHORT),
    LionConfig(**SHORT),
    AdafactorConfig(**SHORT, least_factored=2),
    MuonConfig(**SHORT),
)
PLAIN = {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip_norm": None}
RNG = np.random.default_rng(0)


def one_step(config: OptimizerConfig, values: dict, grads: dict) -> dict:
    axes = {1: ("norm",), 2: ("embed", "mlp")}
    params = {name: boxed(axes[x.ndim], x.shape) for name, x in values.items()}
    optimizer = make_optimizer(config, 10, params)
    return jax.jit(lambda g, v: optimizer.update(g, optimizer.init(v), v)[0])(grads, values)


def random(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def test_lion_steps_by_the_sign() -> None:
    values, grads = {"kernel": random(4, 6)}, {"kernel": random(4, 6)}
    found = one_step(LionConfig(**PLAIN | {"weight_decay": 0.5}, learning_rate=0.1), values, grads)
    expected = -0.1 * (np.sign(grads["kernel"]) + 0.5 * values["kernel"])
    np.testing.assert_allclose(found["kernel"], expected, rtol=1e-6)


def test_adafactor_divides_by_row_and_column_means_relative_to_the_size() -> None:
    values, grads = {"kernel": random(4, 6)}, {"kernel": random(4, 6)}
    found = one_step(AdafactorConfig(**PLAIN, learning_rate=0.1, least_factored=2), values, grads)
    g = np.asarray(grads["kernel"], np.float64)
    rows, columns = (g**2).mean(1, keepdims=True), (g**2).mean(0, keepdims=True)
    u = g / np.sqrt(rows * columns / (g**2).mean())
    u /= max(1.0, np.sqrt((u**2).mean()))
    size = np.sqrt((np.asarray(values["kernel"], np.float64) ** 2).mean())
    np.testing.assert_allclose(found["kernel"], -0.1 * size * u, rtol=1e-4)


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_nadam() -> None:
    values = {"kernel": random(32, 48), "scale": random(8)}
    grads = {"kernel": random(32, 48), "scale": random(8)}
    found = one_step(MuonConfig(**PLAIN, learning_rate=0.1, eps=1e-12), values, grads)
    stretched = np.linalg.svd(np.asarray(found["kernel"]))[1] / (0.1 * 0.2 * np.sqrt(48))
    assert stretched.min() > 0.6
    assert stretched.max() < 1.3
    ahead = 0.9 * 0.1 / (1 - 0.9**2) + 1  # of a first gradient, by its average corrected for two steps
    np.testing.assert_allclose(found["scale"], -0.1 * ahead * np.sign(grads["scale"]), rtol=1e-4)


def test_muon_takes_the_axes_that_a_product_sums_over() -> None:
    params = {
        **PARAMS,
        "out": {"kernel": boxed(("heads", "head_dim", "embed"), (2, 2, 4))},
    }
    numbers = MuonDimensionNumbers
    assert muon_axes(params) == {
        "dense": {"kernel": numbers((0,), (1,)), "bias": None},
        "scanned": {"kernel": numbers((1,), (2,)), "scale": None},
        "heads": {"kernel": numbers((0,), (1, 2)), "bias": None, "own_scale": None},
        "table": {"bytes": None},
        "hash_ngrams": None,
        "head": {"kernel": None},
        "filter": {"log_poles": None, "taps": None},
        "plain": numbers((0,), (1,)),
        "out": {"kernel": numbers((0, 1), (2,))},
    }


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_a_loss_falls_and_the_state_has_a_place_on_every_mesh(config: OptimizerConfig) -> None:
    params = {"kernel": boxed(("embed", "mlp"), (8, 8)), "scale": boxed(("norm",), (8,))}
    optimizer = make_optimizer(config, 100, params)
    values, target, x = {"kernel": random(8, 8), "scale": random(8)}, random(16, 8), random(16, 8)

    def loss(values: dict) -> jax.Array:
        return jnp.mean((x @ values["kernel"] * values["scale"][None] - target) ** 2)

    def step(carried: tuple, _: None) -> tuple:
        found, grads = jax.value_and_grad(loss)(carried[0])
        updates, state = optimizer.update(grads, carried[1], carried[0])
        return (jax.tree.map(jnp.add, carried[0], updates), state), found

    state = optimizer.init(values)
    losses = jax.jit(lambda c: jax.lax.scan(step, c, length=100)[1])((values, state))
    assert losses[-1] < losses[0]
    shapes = jax.eval_shape(optimizer.init, nn.meta.unbox(params))
    placed = state_shardings(shapes, params, make_mesh(fsdp=2, devices=jax.devices()[:2]))
    assert jax.tree.structure(placed) == jax.tree.structure(shapes)


def test_adafactor_holds_a_row_and_a_column_for_a_matrix() -> None:
    params = {"kernel": boxed(("embed", "mlp"), (128, 256))}
    state = jax.eval_shape(make_optimizer(AdafactorConfig(), 1000, params).init, nn.meta.unbox(params))
    assert sum(x.size for x in jax.tree.leaves(state)) < 400


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_stored_configs_are_read_back(config: OptimizerConfig) -> None:
    assert from_json(to_json(config)) == config
