"""Hyena against convolutions summed tap by tap in float64, from its parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import ExplicitFilter, HyenaConfig, ImplicitFilter, ModalFilter, check_capacity, init_state
from jaxblt.testing import Subject
from tests.mixers.hyena.test_filters import naive_implicit
from tests.tolerances import assert_close

LENGTH = 15
MODAL = ModalFilter(modes=3, max_timescale=30.0)
CASES = {
    "modal": HyenaConfig(dim=5, filter=MODAL),
    "modal_both": HyenaConfig(dim=5, filter=MODAL, causal=False),
    "modal_alone": HyenaConfig(dim=5, filter=MODAL, packed=False),
    "implicit": HyenaConfig(dim=5, order=3, filter=ImplicitFilter(filter_len=600, width=7)),
    "implicit_both": HyenaConfig(dim=5, filter=ImplicitFilter(filter_len=9, width=7), causal=False),
    "explicit": HyenaConfig(dim=5, order=3, filter=ExplicitFilter(taps=4), short_taps=2),
    "explicit_both": HyenaConfig(dim=5, filter=ExplicitFilter(taps=4), causal=False, packed=False),
}


def filter_at(config: HyenaConfig, p: dict, lag: int) -> np.ndarray:
    """h[lag], all channels; negative lags look ahead."""
    filter, side = config.filter, int(lag < 0)
    if isinstance(filter, ModalFilter):
        rates = np.exp(np.asarray(p["log_rate"], np.float64))
        sides = [side] if lag or config.causal else [0, 1]
        residues = np.asarray(p["residues"], np.float64)
        return np.sum([(residues[s] * np.exp(-rates[s] * abs(lag))).sum(-1) for s in sides], axis=0)
    if abs(lag) >= filter.taps:
        return np.zeros(config.dim)
    if isinstance(filter, ExplicitFilter):
        taps = np.asarray(p["taps"], np.float64)
        return taps[:, lag if config.causal else lag + filter.taps - 1]
    return naive_implicit(filter, p["implicit"], config.dim, abs(lag))[side]


def convolve(u: np.ndarray, ids: np.ndarray, taps: dict[int, np.ndarray]) -> np.ndarray:
    """sum_s h[t - s] u_s over the tokens s of t's document; u is [T, D]."""
    y = np.zeros_like(u)
    for t in range(len(u)):
        for s in range(len(u)):
            if abs(ids[t]) == abs(ids[s]) and ids[s] > 0 and t - s in taps:
                y[t] += taps[t - s] * u[s]
    return y


def naive_row(config: HyenaConfig, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    p = params["params"]
    content = (ids > 0)[:, None]
    z = (x.astype(np.float64) * content) @ np.asarray(p["in"]["kernel"], np.float64)
    short = np.asarray(p["short"], np.float64)
    taps = {k: short[0, :, k] for k in range(config.short_taps)}
    if not config.causal:
        taps |= {-k: short[1, :, k] for k in range(1, config.short_taps)}
        taps[0] = short[0, :, 0] + short[1, :, 0]
    v, *gates = np.split(convolve(z, ids, taps) * content, config.order + 1, axis=1)
    lags = range(0 if config.causal else 1 - len(x), len(x))
    for i in range(config.order - 1):
        q = p[f"long_{i}"]
        u = gates[i] * v
        v = convolve(u, ids, {lag: filter_at(config, q, lag) for lag in lags}) + np.asarray(q["bias"]) * u
        v = v * content
    return (gates[-1] * v) @ np.asarray(p["out"]["kernel"], np.float64)


@pytest.mark.slow(days=21)
@pytest.mark.parametrize("name", CASES)
def test_equals_direct_convolution(name: str) -> None:
    config = CASES[name]
    subject = Subject(config, length=LENGTH)
    ids = subject.with_holes(subject.documents())
    expected = np.stack([naive_row(config, subject.params, *row) for row in zip(subject.x, ids, strict=True)])
    live = ids > 0
    assert_close(subject.run(ids=ids)[live], expected[live], jnp.float32, n=LENGTH * config.dim)


@pytest.mark.slow(days=21)
@pytest.mark.parametrize("order", [2, 3, 4])
def test_order_is_the_number_of_gates(order: int) -> None:
    config = HyenaConfig(dim=4, order=order, filter=MODAL)
    params = nn.meta.unbox(jax.eval_shape(config.build().init, jax.random.key(0), jnp.zeros((1, 3, 4))))[
        "params"
    ]
    assert params["in"]["kernel"].shape == (4, (order + 1) * 4)
    assert sum(name.startswith("long_") for name in params) == order - 1


def test_parameters_are_named() -> None:
    init = HyenaConfig(dim=4, filter=MODAL).build().init
    params = jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, 3, 4)))["params"]
    assert params["in"]["kernel"].names == ("embed", "channels")
    assert params["out"]["kernel"].names == ("channels", "embed")
    assert params["long_0"]["log_rate"].names == (None, "channels", "modes")


def test_a_modal_state_is_small_and_fp32() -> None:
    state = init_state(HyenaConfig(dim=4, order=3, filter=MODAL), 2, capacity=1_000_000, dtype=jnp.bfloat16)
    assert [(a.shape, a.dtype) for a in state.filters] == [((2, 4, 3), jnp.float32)] * 2
    assert state.short.shape == (2, 16, 2)
    assert state.short.dtype == jnp.bfloat16
    check_capacity(state, more=10_000_000)


def test_a_filter_cut_to_the_capacity_is_bounded_by_it() -> None:
    config = HyenaConfig(dim=2, filter=ImplicitFilter(filter_len=64, width=4))
    state = init_state(config, 1, capacity=16)
    assert state.filters[0].shape == (1, 2, 15)
    with pytest.raises(ValueError, match="HyenaState holds 16"):
        check_capacity(state, more=17)
    assert init_state(config, 1, capacity=1000).filters[0].shape == (1, 2, 63)
    check_capacity(init_state(config, 1, capacity=1000), more=5000)


def test_a_filter_too_long_to_stream_is_refused() -> None:
    config = HyenaConfig(dim=2, filter=ImplicitFilter(filter_len=100_000))
    with pytest.raises(ValueError, match=r"100000 taps at capacity 50000 .* use ModalFilter"):
        init_state(config, 1, capacity=50_000)


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_hyena")
def test_long_streams_forget_beyond_the_filter() -> None:
    """A document longer than the history: chunks of 16 through 20 taps."""
    config = HyenaConfig(dim=3, filter=ImplicitFilter(filter_len=20, width=4))
    subject = Subject(config, length=64)
    fed = subject.feed(subject.x, np.ones(subject.x.shape[:2], np.int32), [16] * 4)
    assert_close(fed, subject.run(), jnp.float32, n=64 * 3)


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("filter", [MODAL, ExplicitFilter(taps=4)], ids=["modal", "explicit"])
def test_sums_of_a_filter_may_exceed_the_largest_number_of_float16(filter: ModalFilter | ExplicitFilter):
    config = HyenaConfig(dim=5, filter=filter, out_bias=True)
    own = {
        name: dict(leaf) if isinstance(leaf, dict) else leaf
        for name, leaf in Subject(config).params["params"].items()
    }
    x = np.asarray(np.random.default_rng(1).normal(size=(2, LENGTH, 5)), np.float32)
    plain = {"kernel": np.eye(5, dtype=np.float32), "bias": np.zeros(5, np.float32)}
    run = lambda dtype, own: jax.jit(config.build(dtype=dtype).apply)({"params": own}, x)[0]  # noqa: E731
    peak = float(jnp.max(jnp.abs(run(jnp.float32, own | {"out": plain}))))
    own["in"] = {"kernel": own["in"]["kernel"] * (1e8 / peak) ** (1 / 3)}
    own["out"]["kernel"] = own["out"]["kernel"] * 1e-5
    assert_close(run(jnp.float16, own), run(jnp.float32, own), jnp.float16, n=LENGTH * 5)
