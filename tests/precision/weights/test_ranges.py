"""Ranges of activations: what clips a heavy tail rounds most entries better."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.layers import Linear
from jaxblt.precision.weights import CHOOSERS, choose_range, input_scales, join_inputs, record_inputs


def rounded(values, range_):
    scale = range_ / 127
    return np.clip(np.round(values / scale), -127, 127) * scale


@pytest.fixture(scope="module")
def heavy():
    """Student's t with two degrees of freedom: the largest of 20,000 entries is 80 times a typical one."""
    return np.random.default_rng(0).standard_t(2, 20_000)


def test_heavy_tails_are_clipped(heavy):
    errors = {c: np.abs(rounded(heavy, choose_range(heavy, c)) - heavy) for c in CHOOSERS}
    assert choose_range(heavy, "minmax") == np.abs(heavy).max()
    for chooser in ("percentile", "mse", "entropy"):
        assert errors[chooser].mean() < errors["minmax"].mean()
    squares = {c: np.mean(e**2) for c, e in errors.items()}
    assert squares["mse"] == min(squares.values()) < squares["minmax"]


def test_even_values_are_hardly_clipped():
    values = np.random.default_rng(1).uniform(-3, 3, 20_000)
    for chooser in CHOOSERS:
        assert choose_range(values, chooser) > 2.8


def test_zeros_and_what_is_not_finite_have_ranges():
    for chooser in CHOOSERS:
        assert choose_range(np.zeros(4), chooser) == 0
        assert not np.isfinite(choose_range(np.array([1, np.inf]), chooser))


def test_scales_come_from_what_products_read():
    layer = Linear("btd,de->bte", {"e": 16}, (None, None))
    params = {"params": {"kernel": jnp.ones((16, 16))}}
    calls = []
    for size in (1.0, 5.0):
        with record_inputs():
            _, sown = layer.apply(params, jnp.full((1, 4, 16), -size), mutable=["intermediates"])
        calls.append(sown["intermediates"])
    (scale,) = input_scales(join_inputs(calls), "minmax").values()
    assert float(scale) == pytest.approx(5 / 127)
