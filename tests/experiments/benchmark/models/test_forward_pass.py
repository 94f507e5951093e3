"""The benchmarks of an entropy model and of a Hyena stack: their gate, what they count, the figures they leave."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.models import entropy, stack
from experiments.benchmark.models.forward_pass import kernel_sizes
from jaxblt.patching import PatcherConfig, closes, make_patches
from jaxblt.profiling import Ceilings, this_machine
from jaxblt.training.flops import matmul_flops
from jaxblt.training.state import widen

CONFIG = entropy.model_config(layers=2, dim=16, heads=2, window=8)
PATCHER = PatcherConfig(threshold=5.1, block_size=32, capacity=9)


@pytest.fixture(scope="module")
def params():
    return entropy.parameters(CONFIG)


@pytest.fixture(scope="module")
def ceilings():
    return Ceilings(1e12, 1e12, "float32", this_machine())


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/models/test_forward_pass")
def test_the_loop_over_bytes_is_the_patcher():
    nats = np.random.default_rng(0).uniform(4.9, 5.3, (1, 100)).astype(np.float32)
    ids = np.zeros((1, 100), np.int32)
    patches = make_patches(PATCHER, jnp.asarray(ids), entropies=jnp.asarray(nats))
    assert int(jnp.sum(patches.overflow)) > 0
    found = np.asarray(patches.closed).reshape(-1)[:100]
    np.testing.assert_array_equal(entropy.loop_over_bytes(PATCHER, nats[0].astype(np.float64)), found)
    free = closes(PATCHER, jnp.asarray(ids), jnp.asarray(nats), jnp.ones((1, 100), jnp.int32))
    assert found.sum() < int(jnp.sum(free))


def test_exact_entropies_of_a_distribution():
    p = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(p), -1e4) + 3
    np.testing.assert_allclose(entropy.exact_entropies(logits), [1.5 * np.log(2), 0.0], atol=1e-12)


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/models/test_forward_pass")
def test_the_gate_refuses_boundaries_of_other_entropies(params, monkeypatch):
    ids = entropy.random_bytes(2, 96)
    found = entropy.gate(CONFIG, params, PATCHER, ids)
    assert found["boundaries"] > 6
    assert found["different_boundaries"] <= found["undecided"]
    exact = entropy.exact_entropies
    monkeypatch.setattr(entropy, "exact_entropies", lambda logits: exact(logits)[::-1])
    with pytest.raises(RuntimeError, match="boundaries differ from the loop's"):
        entropy.gate(CONFIG, params, PATCHER, ids)


def test_flops_of_a_byte_are_those_of_the_matmuls_and_of_the_keys_it_sees(params):
    length, matrices = 8, 2 * kernel_sizes(params)
    # a window as long as the row: byte t sees t + 1 keys, 4.5 on average
    assert entropy.flops_per_byte(CONFIG, params, length) == pytest.approx(matrices + 4 * 2 * 16 * 4.5)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    counted = (
        matmul_flops(lambda p, i: CONFIG.build().apply({"params": widen(p)}, i)[0], params, ids) / length
    )
    # a row this short is one block of scores, the hidden ones included
    assert matrices == pytest.approx(counted - 4 * 2 * 16 * length)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_entropy_figures(params, ceilings):
    found = entropy.cut(CONFIG, params, PATCHER, entropy.random_bytes(2, 64), ceilings, trials=20)
    seconds = found["seconds"]
    assert seconds["trials"] == 20
    assert found["bytes_per_second"] == pytest.approx(128 / seconds["median"])
    assert found["share_of_floor"] == pytest.approx(found["flops"] / 1e12 / seconds["median"])
    assert found["planned_bytes"]["temporaries"] > 0
    json.dumps(found)


def test_a_shape_that_is_none():
    assert entropy.parse_shape("64x8192") == (64, 8192)
    with pytest.raises(ValueError, match="'64by8192' is not ROWSxBYTES"):
        entropy.parse_shape("64by8192")


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_stack_figures(ceilings):
    config = stack.stack_config(layers=2, dim=16)
    params = stack.parameters(config)
    # in and out of the operator, and three matrices of the MLP, whose width is rounded up to 64
    assert kernel_sizes(params) == 2 * (4 * 16**2 + 3 * 16 * 64)
    found = stack.forward(config, params, jnp.ones((1, 32, 16), jnp.float32), ceilings, trials=20)
    assert found["tokens_per_second"] == pytest.approx(32 / found["seconds"]["median"])
    assert found["flops"] == 2 * 32 * kernel_sizes(params)
    json.dumps(found)
