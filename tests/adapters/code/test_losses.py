"""Losses of codes by hand, and how they arrive in what training minimises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, AdapterLosses, ChunkMean, Prefix, RouterConfig
from jaxblt.adapters.code import losses
from jaxblt.models import Stack, StackConfig
from jaxblt.training.metrics import sown_losses
from tests.adapters.routing import DOCUMENTS, params_of, sown
from tests.parameters import drawn

correlation, imbalance, mean_entropy, mean_flip, mean_square_beside = map(
    jax.jit,
    (losses.correlation, losses.imbalance, losses.mean_entropy, losses.mean_flip, losses.mean_square_beside),
)
ONE = jnp.ones((1, 4), jnp.float32)


def test_entropy_by_hand():
    shares = jnp.asarray([[[1.0, 0.0], [0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]])
    counted = jnp.asarray([[1.0, 1.0, 1.0, 0.0]])
    quarter = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    np.testing.assert_allclose(mean_entropy(shares, counted), (0 + np.log(2) + quarter) / 3, rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda s: mean_entropy(jax.nn.softmax(s), ONE)))(jnp.asarray(shares) * 200)
    assert np.isfinite(gradient).all()


def test_balance_by_hand():
    """Three of four tokens choose expert 0, with mean shares .65 and .35."""
    shares = jnp.asarray([[[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.2, 0.8]]])
    np.testing.assert_allclose(imbalance(shares, ONE), 2 * (0.75 * 0.65 + 0.25 * 0.35), rtol=1e-6)
    even = jnp.asarray([[[0.9, 0.1], [0.1, 0.9]] * 2])
    np.testing.assert_allclose(imbalance(even, ONE), 1, rtol=1e-6)
    alone = jnp.asarray([[[1.0, 0.0]] * 4])
    np.testing.assert_allclose(imbalance(alone, ONE), 2, rtol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_losses")
def test_a_bank_is_used_more_evenly_with_its_loss():
    """Of rows of four kinds a router that starts with one expert for three of them; the code has no other use."""
    rng = np.random.default_rng(4)
    kinds = jnp.asarray(np.repeat(rng.standard_normal((4, 1, 6)), 16, 1).astype(np.float32))
    used = []
    for weight in (0.0, 1.0):
        bank = AdapterConfig(
            rank=4,
            blocks=4,
            router=RouterConfig(level="token", chunk=4, reads=(ChunkMean(),), hidden=8),
            losses=AdapterLosses(balance=weight, entropy=-weight / 4),
        )
        module = bank.build()
        params = drawn(module, kinds, seed=1)["params"]

        def lost(params, module=module):
            side = module.apply({"params": params}, kinds, mutable=["losses", "intermediates"])[1]
            shares = side["intermediates"]["shares"][0]
            return sown_losses(side), imbalance(shares, jnp.ones(kinds.shape[:2]))

        def step(params, _, lost=lost):
            gradient, found = jax.grad(lost, has_aux=True)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), found

        used.append(jax.jit(lambda p, step=step: jax.lax.scan(step, p, None, length=200)[1])(params))
    (without, _), (first, last) = ((each[0], each[-1]) for each in used)
    assert first == without == used[0][-1]
    assert last < 1.1 < 1.3 < first


def test_flips_by_hand():
    """One change of a one-hot code in two places where it may change, and one that is of another document."""
    code = jnp.asarray([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])
    changes = jnp.asarray([[False, True, True, False]])
    known = jnp.ones((1, 4), bool)
    np.testing.assert_allclose(mean_flip(code, known, changes), 0.5)
    np.testing.assert_allclose(mean_flip(code, known.at[0, 1].set(False), changes), 0)


def test_decorrelation_by_hand():
    code = jnp.asarray([[[1.0, 2.0], [3.0, 6.0], [1.0, 2.0], [3.0, 6.0]]])
    np.testing.assert_allclose(correlation(code, ONE), 2.0**2, rtol=1e-6)
    assert correlation(code[..., :1], ONE) == 0
    assert correlation(code[:, :1], ONE[:, :1]) == 0
    grid = jnp.asarray([[[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]])
    np.testing.assert_allclose(correlation(grid, ONE), 0, atol=1e-7)


def test_orthogonality_by_hand():
    gram = jnp.asarray([[9.0, 0.5, 0.0], [0.5, 4.0, -1.0], [0.0, -1.0, 1.0]])
    np.testing.assert_allclose(mean_square_beside(gram), (2 * 0.25 + 2 * 1) / 6, rtol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_losses")
def test_weights_are_applied_to_the_tokens_that_have_a_code():
    router = RouterConfig(chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4)
    weights = AdapterLosses(entropy=0.5, balance=2.0, flip=3.0, decorrelation=4.0)
    config = AdapterConfig(rank=8, blocks=4, router=router, losses=weights)
    params = params_of(config)
    (code, _), side = sown(config, params, np.asarray(_noise()), DOCUMENTS)
    time = np.concatenate([np.arange(26), np.arange(14), np.arange(9), [-1] * 2, np.arange(24), [-1] * 5])
    time = time.reshape(DOCUMENTS.shape)
    known, changes = jnp.asarray(time >= 5), jnp.asarray((time > 0) & (time % 5 == 0))
    tokens = known.astype(jnp.float32)
    expected = {
        "code_entropy": -0.5 * mean_entropy(code, tokens),
        "code_balance": 2 * imbalance(code, tokens),
        "code_flip": 3 * mean_flip(code, known, changes),
        "code_decorrelation": 4 * correlation(code, tokens),
    }
    assert side["losses"].keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(side["losses"][name][0], value, rtol=1e-5, err_msg=name)
        assert abs(value) > 1e-3


def _noise():
    return np.random.default_rng(1).standard_normal((*DOCUMENTS.shape, 6)).astype(np.float32)


def test_orthogonality_arrives_from_every_layer_of_a_scan():
    """And is the sum over sites and layers of both matrices."""
    adapter = AdapterConfig(sites=("mlp/*",), rank=2, losses=AdapterLosses(orthogonality=0.5))
    stack = StackConfig(
        dim=4, num_layers=2, pattern=("recurrence",), mlp_dim=4, remat="full", adapter=adapter
    )
    x = jnp.ones((1, 4, 4))
    params = drawn(Stack(stack), x)["params"]
    side = jax.jit(lambda p: Stack(stack).apply({"params": p}, x, mutable=["losses"])[1])(params)
    found, count = 0.0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if path[-1].key in ("u", "v"):
            rows = np.asarray(leaf) if path[-1].key == "u" else np.asarray(leaf).swapaxes(1, 2)
            found += 0.5 * sum((one @ two) ** 2 for one, two in rows)
            count += 1
    assert count == 6
    np.testing.assert_allclose(sown_losses(side), found, rtol=1e-5)
