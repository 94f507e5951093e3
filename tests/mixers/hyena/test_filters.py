"""Filters against their formulas in float64."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.mixers import ExplicitFilter, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.mixers.hyena import implicit_taps
from jaxblt.mixers.hyena.finite_filter import ImplicitTaps, near_pixels
from pallas_kernels.long_conv import long_conv
from tests.tolerances import assert_close


def naive_implicit(filter: ImplicitFilter, params: dict, dim: int, lag: int) -> np.ndarray:
    """[sides, dim]: the formula of the docstring at one lag."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    t, bands = lag / filter.normaliser, np.arange(1, (filter.emb_dim - 1) // 2 + 1)
    hidden = np.concatenate([[t], np.cos(2 * np.pi * bands * t), -np.sin(2 * np.pi * bands * t)])
    for i in range(filter.inner_layers + 1):
        hidden = np.sin(p["frequency"] * (hidden @ p[f"layer_{i}"]["kernel"] + p[f"layer_{i}"]["bias"]))
    out = np.einsum("w,wsd->sd", hidden, p["out"]["kernel"])
    decay = np.linspace(-np.log(filter.target) / filter.slow, -np.log(filter.target) / filter.fast, dim)
    return out * np.sqrt(2 * decay / filter.normaliser) * np.exp(-decay * t)


def taps_of(
    filter: ImplicitFilter, length: int, dim: int = 4, params: dict | None = None
) -> tuple[np.ndarray, dict]:
    module = ImplicitTaps(filter, dim, 2)
    init, apply = (jax.jit(f, static_argnums=1) for f in (module.init, module.apply))
    chosen: dict = nn.meta.unbox(init(jax.random.key(0), length)) if params is None else params
    return np.asarray(apply(chosen, length)), chosen


def amplification(filter: ImplicitFilter) -> int:
    """Terms' worth of rounding errors: each sine layer passes on those before it, times its frequency."""
    return int(filter.sine_freq ** (2 * filter.inner_layers))


@pytest.mark.parametrize(
    "filter", [ImplicitFilter(30, width=8), ImplicitFilter(50, emb_dim=7, width=8, inner_layers=1)]
)
def test_implicit_taps_follow_the_formula(filter: ImplicitFilter) -> None:
    taps, params = taps_of(filter, filter.filter_len)
    expected = np.stack(
        [naive_implicit(filter, params["params"], 4, lag) for lag in range(filter.filter_len)], -1
    )
    assert_close(taps, expected, n=amplification(filter))


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
@pytest.mark.parametrize("span", [8, 30])
def test_taps_of_several_spans_follow_the_formula(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    """As filters above 16,384 taps are made; the last span is not full, or is."""
    monkeypatch.setattr(implicit_taps, "SPAN", span)
    filter = ImplicitFilter(60, width=8)
    taps, params = taps_of(filter, 60)
    expected = np.stack([naive_implicit(filter, params["params"], 4, lag) for lag in range(60)], -1)
    assert_close(taps, expected, n=amplification(filter))


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
def test_runtime_length_does_not_define_the_filter() -> None:
    filter = ImplicitFilter(64, width=8)
    whole, params = taps_of(filter, 64)
    assert_close(taps_of(filter, 10, params=params)[0], whole[..., :10], n=amplification(filter))


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
def test_a_longer_filter_keeps_the_taps_it_was_trained_with() -> None:
    short, params = taps_of(ImplicitFilter(32, width=8), 32)
    longer, _ = taps_of(ImplicitFilter(128, reference_len=32, width=8), 128, params=params)
    assert_close(longer[..., :32], short, n=amplification(ImplicitFilter(32)))
    other, _ = taps_of(ImplicitFilter(128, width=8), 128, params=params)
    assert np.max(np.abs(other[..., :32] - short)) > 0.01


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
def test_an_implicit_filter_learns_a_delay_of_2000_steps() -> None:
    """y_t = x_(t - 2000) of white noise; a filter of zeros has an error of 1."""
    length, delay = 4096, 2000
    module = ImplicitTaps(ImplicitFilter(length, emb_dim=513, sine_freq=1.0), 1, 1)
    params = nn.meta.unbox(jax.jit(module.init, static_argnums=1)(jax.random.key(0), length))
    optimiser = optax.adam(3e-3)

    def loss(params: Any, key: Any) -> Any:
        x = jax.random.normal(key, (1, 1, length))
        y = long_conv(x, module.apply(params, length)[0])  # pyright: ignore
        return jnp.mean((y[..., delay:] - x[..., :-delay]) ** 2)

    @jax.jit
    def steps(params: Any, keys: Any) -> Any:
        def step(carried: Any, key: Any) -> Any:
            params, moments = carried
            error, gradients = jax.value_and_grad(loss)(params, key)
            with jax.numpy_dtype_promotion("standard"):
                changes, moments = optimiser.update(gradients, moments)
            return (optax.apply_updates(params, changes), moments), error

        (params, _), errors = jax.lax.scan(step, (params, optimiser.init(params)), keys)
        return module.apply(params, length), errors

    taps, errors = steps(params, jax.random.split(jax.random.key(1), 1000))
    assert np.argmax(np.abs(taps)) == delay
    assert taps[0, 0, delay] > 0.5
    assert np.mean(errors[:20]) > 0.9
    assert np.mean(errors[-20:]) < 0.2


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
def test_the_window_falls_as_promised() -> None:
    filter = ImplicitFilter(1000, width=8, fast=0.3, slow=1.5, target=1e-2)
    taps, _ = taps_of(filter, 1000, dim=64)
    energy = np.sum(taps.astype(np.float64) ** 2, axis=-1)
    tail = np.sqrt(np.sum(taps[..., 300:].astype(np.float64) ** 2, axis=-1) / energy)
    assert np.all(tail[:, -1] < 0.05), "the fastest channel falls to a hundredth after .3 L"
    assert np.all(tail[:, 0] > 0.1), "the slowest does not"


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_filters")
def test_modes_span_the_timescales_and_keep_the_energy() -> None:
    config = HyenaConfig(dim=512, filter=ModalFilter(modes=8, min_timescale=2.0, max_timescale=2000.0))
    params = jax.jit(config.build().init)(jax.random.key(0), jnp.zeros((1, 2, 512)))
    params = nn.meta.unbox(params)["params"]["long_0"]
    rates = np.exp(np.asarray(params["log_rate"], np.float64))[0]
    timescales = np.broadcast_to(np.geomspace(2.0, 2000.0, 8), rates.shape)
    np.testing.assert_allclose(1 / rates, timescales, rtol=1e-5)
    residues = np.asarray(params["residues"], np.float64)[0]
    decay = np.exp(-rates)
    # white input of variance 1 gives sum_mn r_m r_n / (1 - a_m a_n), on average over channels 1
    gram = residues[:, :, None] * residues[:, None] / (1 - decay[:, :, None] * decay[:, None])
    assert 0.9 < gram.sum((1, 2)).mean() < 1.1


def test_taps_of_images_start_near_in_both_directions() -> None:
    """Rows of 8 pixels: lag 8 is one pixel up and lag 4 is half a row away; the energy is 1 either way."""
    for shape, middle in (((4000, 33), 16), ((4000, 17), 0)):
        taps = near_pixels(ExplicitFilter(taps=17, columns=8))(jax.random.key(0), shape)
        own = np.std(np.asarray(taps), 0)[middle:]
        np.testing.assert_allclose(own[[1, 8, 16]] / own[0], np.exp([-1 / 4.5, -1 / 4.5, -4 / 4.5]), rtol=0.1)
        assert own[4] < 0.05 * own[0]
        assert np.sum(np.square(taps), 1).mean() == pytest.approx(1, rel=0.1)
