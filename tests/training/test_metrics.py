import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.patching.patches import from_closed
from jaxblt.side_outputs import SIDE_OUTPUTS, sow_loss, sow_metric, sow_price
from jaxblt.training.metrics import (
    answered,
    as_scalars,
    bits,
    cross_entropy,
    layer_norms,
    patch_counts,
    patch_metrics,
    sown_losses,
    sown_metrics,
)
from jaxblt.training.state import start
from jaxblt.training.step import make_train_step
from tests.tolerances import tol
from tests.training.test_step import build
from tests.training.tiny import TinyConfig, random_batch


@pytest.mark.slow(days=28, group="costly", turn="training/test_metrics")
def test_cross_entropy_is_that_of_a_softmax_in_fp32():
    logits = jax.random.normal(jax.random.key(0), (2, 5, 11)) * 4
    targets = jax.random.randint(jax.random.key(1), (2, 5), 0, 11, jnp.int32)
    got = cross_entropy(logits.astype(jnp.bfloat16), targets)
    assert got.dtype == jnp.float32
    rounded = np.asarray(logits.astype(jnp.bfloat16)).astype(np.float64)
    p = np.exp(rounded) / np.exp(rounded).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, np.asarray(targets)[..., None], -1)[..., 0])
    np.testing.assert_allclose(got, expected, **tol(jnp.float32, n=11))


def test_uniform_logits_cost_eight_bits_among_256():
    loss = cross_entropy(jnp.zeros((1, 1, 256)), jnp.zeros((1, 1), jnp.int32))
    assert abs(bits(float(loss[0, 0])) - 8) < 1e-6
    assert bits(math.log(2)) == 1.0


@pytest.mark.slow(days=28, group="costly")
def test_rows_are_answered_as_likely_as_their_targets_are():
    """A row without targets is not answered, and nobody answers better to pay less."""
    p = np.asarray([[[0.5, 0.5], [0.125, 0.875], [0.01, 0.99]], [[0.5, 0.5]] * 3], np.float32)
    targets, weights = jnp.zeros((2, 3), jnp.int32), jnp.asarray([[1.0, 1.0, 0.0], [0.0] * 3])
    share = lambda logits: answered(logits, targets, weights)  # noqa: E731
    np.testing.assert_allclose(share(jnp.log(p)), [0.25, 0], rtol=1e-5)
    assert not np.any(jax.grad(lambda logits: jnp.sum(share(logits)))(jnp.log(p)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        self.sow("losses", "balance", jnp.sum(x))
        self.sow("metrics", "mean", jnp.mean(x))
        sow_metric(self, "each", x)
        sow_price(self, "price", x)
        return x + jnp.float32(1), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "losses": 0, "metrics": 0}
        x, _ = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)(
            name="layers"
        )(x, None)
        self.sow("losses", "other", jnp.float32(0.5))
        return x


def test_side_outputs_arrive_through_scan_and_remat():
    _, side = Scanned().apply({}, jnp.asarray([1.0, 1.5]), mutable=SIDE_OUTPUTS)
    # layers see 1, 2, 3 in the first element and half more in the second
    apart, first, second = 2 * (1 + 2 + 3) + 3 * 0.5 + 0.5, 1 + 2 + 3, 1 + 2 + 3 + 3 * 0.5
    assert float(sown_losses(side)) == apart + (first + second) / 2
    assert float(sown_losses(side, jnp.asarray([1.0, 0.0]))) == apart + first / 2
    found = as_scalars(sown_metrics(side))
    assert found == {"layers/mean": 2.25, "layers/each/0": 2.0, "layers/each/1": 2.5}
    assert float(sown_losses({})) == 0.0
    assert sown_metrics({}) == {}


class Reporting(nn.Module):
    @nn.compact
    def __call__(self, x):
        sow_loss(self, "balance", jnp.sum(x))
        sow_metric(self, "mean", jnp.mean(x))
        return self.param("scale", nn.initializers.ones, ()) * x


def test_init_returns_parameters_alone():
    """Given back to `apply`, side outputs of another input would be counted in every call."""
    module, x = Reporting(), jnp.ones(2)
    made = module.init(jax.random.key(0), x)
    assert set(made) == {"params"}
    assert float(sown_losses(module.apply(made, x, mutable=SIDE_OUTPUTS)[1])) == 2


def test_patch_figures():
    closed = np.array([[0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]], bool)
    segments = np.array([[1] * 8, [1] * 4 + [0] * 4], np.int32)

    @jax.jit
    def figures(closed, segments):
        return patch_metrics(patch_counts(from_closed(closed, segments, block_size=4, capacity=2)))

    # row 0: [0-1][2-3] then [4][5-7] with one boundary refused; row 1: [0-3] and a block of padding
    found = dict(figures(jax.device_put(closed), jax.device_put(segments)))
    for name, expected in {"patches": 5, "bytes_per_patch": 12 / 5, "overflow": 1 / 6}.items():
        np.testing.assert_allclose(found.pop(name), expected, rtol=1e-6)
    assert not found


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
