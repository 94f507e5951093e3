"""State engines: against loops over tokens in f64, norms over length, routes, counts, edges and levels."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from scipy.special import expit as sigmoid

from jaxblt.mixers import StateEngineConfig, init_state
from jaxblt.mixers.slots.state_edges import communicate
from jaxblt.mixers.slots.state_slots import largest, only_allowed, routed
from jaxblt.models.pulse import SimplePulse
from jaxblt.parallel import make_mesh
from jaxblt.side_outputs import SIDE_OUTPUTS
from jaxblt.testing import Subject
from jaxblt.training.flops import count_params
from jaxblt.training.metrics import sown_losses
from pallas_kernels._dispatch import compiling_for, record_choices
from tests.mixers.linear.test_matrix_state import read_out, stream
from tests.tolerances import assert_close

Weights = dict[str, Any]
DIM, INTERVAL = 6, 5
H200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
PLAIN = StateEngineConfig(dim=DIM, num_heads=2, head_dim=4, num_slots=6, chunk_size=4)
COUNTED = dataclasses.replace(
    PLAIN, num_slots=None, levels=(5, 3), adaptive_count=True, top_k_states=3, num_heads=1
)
TURNS = pytest.mark.slow(days=28, group="memories and states")
EDGES = dataclasses.replace(PLAIN, interval=INTERVAL, state_attention=True, state_routes=True)


@functools.cache
def subject_of(config: StateEngineConfig) -> Subject:
    """With parameters that are all noise, biases and shares too; nothing is compiled to draw them."""
    x = jax.ShapeDtypeStruct((3, 24, config.dim), jnp.float32)
    shapes = {"params": nn.meta.unbox(jax.eval_shape(config.build().init, jax.random.key(0), x))["params"]}
    rng = np.random.default_rng(0)
    return Subject(
        config,
        params=jax.tree.map(lambda p: jnp.asarray(0.4 * rng.standard_normal(p.shape), p.dtype), shapes),
    )


@pytest.mark.slow(days=28, group="costly")
def test_engines_differ_only_by_the_parameters_of_their_states():
    """Each state of a head has a column of its route, the column's bias and a bias of its reads."""
    counts = []
    for slots in (32, 64, 256):
        module = StateEngineConfig(dim=16, num_heads=2, num_slots=slots).build()
        counts.append(count_params(jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 8, 16))))[0])
    assert np.diff(counts).tolist() == [slots * 2 * (16 + 2) for slots in (32, 192)]


def count_mask(w: Weights, x: np.ndarray, live: np.ndarray, slots: int) -> np.ndarray:
    """The share of each slot that each token has, [T, S]."""
    u = x @ w["in"]["kernel"]
    mean = np.cumsum(u, 0) / np.maximum(np.cumsum(live), 1)[:, None]
    c = sigmoid((mean * sigmoid(mean)) @ w["out"]["kernel"] + w["out"]["bias"])
    part = np.clip(4 + c * (slots - 4) - np.arange(slots), 0, 1)
    return 3 * part**2 - 2 * part**3


def moved(w: Weights, config: StateEngineConfig, head: int, s: Any, h: Any, c: Any) -> tuple[Any, Any]:
    """One head's states behind an edge, [S, M], and c of an LSTM."""
    if config.cell == "linear":
        z = sigmoid(w["cell_share"][head])
        s = (1 - z) * s + z * h
    if config.cell in ("gru", "lstm"):
        into, back, b = (w[f"cell_{n}"][head] for n in ("input", "recurrent", "bias"))
        a, r = [s @ m for m in into], [h @ m for m in back]
        if config.cell == "gru":
            z = sigmoid(a[1] + r[1] + b[1])
            s = (1 - z) * np.tanh(a[2] + b[2] + sigmoid(a[0] + r[0] + b[0]) * r[2]) + z * h
        else:
            i, f, g, o = (a[n] + r[n] + b[n] for n in range(4))
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            s = sigmoid(o) * np.tanh(c)
    if config.state_attention:
        q, k, v = (s @ m for m in w["attention"][head])
        b = sigmoid(w["attention_share"][head])
        s = (1 - b) * s + b * np.tanh(scipy.special.softmax(q @ k.T / np.sqrt(s.shape[1]), -1) @ v)
    return s, c


def loop(w: Weights, x: np.ndarray, live: np.ndarray, config: StateEngineConfig) -> np.ndarray:
    """Outputs of one document: a loop over heads and tokens, of which those that are not live are holes."""
    (q, k, v), count, width = (stream(w, n, x) for n in "qkv"), config.slots, 4
    logits = np.einsum("td,dhs->ths", x, w["route"]["kernel"]) + w["route"]["bias"]
    gate = -np.log1p(np.exp(x @ w["gate"]["kernel"] + w["gate"]["bias"]))
    there = count_mask(w["count"], x, live, count) if config.adaptive_count else np.ones((len(x), count))
    o = np.zeros_like(v)
    for head in range(config.num_heads):
        s = h = c = np.zeros((count, 2 * width))
        for t in range(len(x)):
            if config.has_edges and t and t % config.interval == 0:
                s, c = moved(w, config, head, s, h, c)
                h = s
            if not live[t]:
                continue
            route = logits[t, head]
            if config.state_routes:
                asked = np.einsum("d,dk->k", x[t], w["route_query"]["kernel"][:, head])
                route = route + h[:, :width] @ asked / np.sqrt(width)
            route = np.where(there[t] > 0, route, -np.inf)
            likely = there[t] * np.exp(route - route.max())
            if config.top_k_states:
                likely = np.where(np.argsort(np.argsort(-likely)) < config.top_k_states, likely, 0)
            larger = max(count / (t + 1), 1) if config.full else 1
            share = 1 - np.exp(likely / likely.sum() * larger * gate[t, head] * config.pace)
            s = (1 - share)[:, None] * s + share[:, None] * np.concatenate([k[t, head], v[t, head]])
            read = np.exp(s[:, :width] @ q[t, head] / np.sqrt(width) + w["read_bias"][head]) * there[t]
            o[t, head] = read / read.sum() @ s[:, width:]
    return read_out(w, o, x)


CASES = [
    pytest.param(COUNTED, marks=TURNS),
    dataclasses.replace(EDGES, cell="gru"),
    pytest.param(dataclasses.replace(PLAIN, cell="gru", interval=INTERVAL), marks=TURNS),
    pytest.param(PLAIN, marks=TURNS),
    pytest.param(dataclasses.replace(PLAIN, full=False), marks=TURNS),
    pytest.param(dataclasses.replace(EDGES, cell="lstm"), marks=TURNS),
    pytest.param(
        dataclasses.replace(
            EDGES, cell="linear", top_k_states=2, adaptive_count=True, segment_alignment=INTERVAL
        ),
        marks=TURNS,
    ),
    pytest.param(dataclasses.replace(PLAIN, num_slots=17, top_k_states=1, gathered=True), marks=TURNS),
]


@pytest.mark.parametrize(
    "config", CASES, ids=["counted", "gru", "cell alone", "plain", "filling", "lstm", "linear", "gathered"]
)
def test_equals_the_loop(config: StateEngineConfig) -> None:
    subject = subject_of(config)
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), subject.params["params"])
    ids, expected = subject.with_holes(subject.documents()), np.zeros(subject.x.shape)
    for row, document in {(r, s) for r in range(len(ids)) for s in np.abs(ids[r]) if s}:
        span = np.abs(ids[row]) == document
        live = ids[row, span] > 0
        x = np.where(live[:, None], subject.x[row, span].astype(np.float64), 0)
        expected[row, span] = loop(w, x, live, config) * live[:, None]
    assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * DIM)


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize(("slots", "full", "filled"), [(None, False, 20), (128, False, 250), (128, True, 20)])
def test_norms_are_flat_to_2000_tokens(slots: int | None, full: bool, filled: int) -> None:
    """A sum over tokens would grow a hundredfold. More slots take longer to be filled; outputs are level from 20 on."""
    config = StateEngineConfig(dim=32, num_heads=4, num_slots=slots, full=full)
    x = jax.random.normal(jax.random.key(0), (2, 2000, 32))
    module = config.build()
    params = jax.jit(module.init)(jax.random.key(1), x[:, :1])["params"]
    ids = jnp.ones(x.shape[:2], jnp.int32)
    state = init_state(config, 2, capacity=1)
    norms = {}
    run = jax.jit(lambda ids: module.apply({"params": params}, x, segment_ids=ids, state=state))
    for count in (20, filled, 2000):
        y, after = run(jnp.where(jnp.arange(2000)[None] < count, ids, 0))
        norms[count] = [
            float(jnp.linalg.norm(a, axis=-1).mean()) for a in (after.slots.values, y[:, count - 20 : count])
        ]
    ratios = np.array([norms[2000][0] / norms[filled][0], norms[2000][1] / norms[20][1]])
    assert np.all((ratios > 1 / 1.5) & (ratios < 1.5)), norms


def test_exactly_k_routes_that_sum_to_one_and_the_gradient_is_theirs() -> None:
    logits = jax.random.normal(jax.random.key(0), (5, 3, 7))
    choose = lambda x: routed(x, largest(x, 2))  # noqa: E731
    slopes = jax.grad(lambda x: jnp.sum(choose(x)[..., 0]))
    routes, gradient = map(np.asarray, jax.jit(lambda x: (choose(x), slopes(x)))(logits))
    assert np.all(np.sum(routes > 0, -1) == 2)
    np.testing.assert_allclose(np.sum(routes, -1), 1, rtol=1e-6)
    assert np.all((gradient != 0) <= (routes > 0))


@TURNS
def test_a_choice_at_the_states_can_be_held() -> None:
    config = dataclasses.replace(EDGES, num_heads=1, top_k_states=2)
    subject, ids = subject_of(config), jnp.ones((3, 24), jnp.int32)
    run = jax.jit(functools.partial(subject.module.apply, mutable=["choices"]))
    (y, _), made = run(subject.params, subject.x, segment_ids=ids)
    chosen = made["choices"]["routes"]
    assert chosen.shape == (3, 24, 1, 2)
    for choice, same in ((chosen, True), ((chosen + 1) % 6, False)):
        (found, _), _ = run(subject.params | {"choices": {"routes": choice}}, subject.x, segment_ids=ids)
        assert np.allclose(found, y, atol=1e-6) == same


def test_a_mask_multiplies_the_softmax() -> None:
    logits, mask = jnp.asarray([[1.0, 2.0, 3.0]]), jnp.asarray([[1.0, 0.25, 0.0]])
    choose = lambda m: routed(only_allowed(logits, m))[0]  # noqa: E731
    found, gradient = jax.jit(lambda m: (choose(m), jax.grad(lambda m: choose(m)[0])(m)))(mask)
    expected = np.exp([1.0, 2.0, -np.inf]) * [1, 0.25, 0]
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-6)
    assert np.all(np.isfinite(gradient))


@functools.cache
def reporter(config: StateEngineConfig) -> Any:
    """(params) -> what a mixer sows in the training pass, and the gradients of its losses."""
    subject = subject_of(config)
    x, ids = jnp.asarray(subject.x), jnp.asarray(subject.documents())

    def sown(params: Any) -> Any:
        _, side = subject.module.apply({"params": params}, x, segment_ids=ids, mutable=SIDE_OUTPUTS)
        metrics = {name: metric.value for name, (metric,) in side["metrics"].items()}
        return sown_losses(side), metrics

    return jax.jit(jax.grad(sown, has_aux=True))


def test_the_count_trains_and_masked_slots_are_neither_written_nor_read() -> None:
    params = subject_of(COUNTED).params["params"]
    out = params["count"]["out"] | {"bias": jnp.asarray([-1.0])}
    gradient, metrics = reporter(COUNTED)(params | {"count": params["count"] | {"out": out}})
    assert 4 < metrics["state_count"] < 7
    assert np.all(metrics["state_route_mass"][7:] == 0)
    assert np.all(metrics["state_read_mass"][7:] == 0)
    for leaf in jax.tree.leaves(gradient["count"]):
        assert np.any(np.asarray(leaf))


def test_the_balance_loss_is_one_for_even_routes_and_s_over_k_for_a_single_slot() -> None:
    params = subject_of(COUNTED).params["params"]
    single = params["route"] | {"bias": jnp.zeros((1, 8)).at[:, 2].set(50.0)}
    _, metrics = reporter(COUNTED)(params | {"route": single})
    assert metrics["state_balance"] == pytest.approx(8 / 3)
    assert metrics["state_route_mass"][2] == pytest.approx(1)
    gradient, even = reporter(COUNTED)(params)
    assert 0.9 < even["state_balance"] < 2
    assert np.sum(even["state_read_mass"]) == pytest.approx(1)
    assert np.any(np.asarray(gradient["route"]["kernel"]))


def test_the_balance_loss_evens_routes_out() -> None:
    """Of routes that prefer two slots, descent on the losses alone makes the preferred ones lose share."""
    params = subject_of(COUNTED).params["params"]
    skewed = params["route"] | {"bias": jnp.zeros((1, 8)).at[:, 1:3].set(3.0)}
    params, found = params | {"route": skewed}, []
    for _ in range(30):
        gradient, metrics = reporter(COUNTED)(params)
        found.append((float(metrics["state_balance"]), float(metrics["state_route_mass"].max())))
        moved = jax.tree.map(lambda p, g: p - 100.0 * g, params["route"], gradient["route"])
        params = params | {"route": moved}
    (first, most), (last, least) = found[0], found[-1]
    assert first > 2
    assert last < first - 0.5
    assert least < most - 0.05, found


def test_states_attend_to_each_other_in_any_order() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    s, order = jax.random.normal(keys[0], (2, 3, 5, 4)), np.asarray([3, 0, 4, 1, 2])
    weights = {
        "attention": jax.random.normal(keys[1], (3, 3, 4, 4)),
        "share": jax.random.normal(keys[2], (3, 4)),
    }
    run = jax.jit(communicate)
    permuted, expected = run(weights, s[:, :, order]), np.asarray(run(weights, s))[:, :, order]
    np.testing.assert_allclose(permuted, expected, rtol=1e-5, atol=1e-6)


def test_upper_levels_are_written_to_more_slowly() -> None:
    config = StateEngineConfig(dim=DIM, num_heads=1, levels=(4, 2, 1))
    np.testing.assert_allclose(config.pace, [1, 1, 1, 1, 0.25, 0.25, 0.0625])
    assert config.slots == 7


def chosen(config: StateEngineConfig, length: int = 70) -> list[str]:
    """Which implementations a training step of one row in bfloat16 takes on an H200."""
    module, x = config.build(dtype=jnp.bfloat16), jax.ShapeDtypeStruct((1, length, config.dim), jnp.bfloat16)
    with compiling_for(H200), record_choices() as lines:
        jax.eval_shape(module.init, jax.random.key(0), x)
    return [line.split(" on ")[0] for line in lines if line.startswith("gated_linear_attention")]


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/test_state_engine")
def test_slots_run_in_kernels_where_they_fill_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """SimplePulse's do, and 16 slots, which are filled up with zeros; a longer row is written in stretches."""
    monkeypatch.setattr(
        "pallas_kernels._linear_state.jla.why_not_package", lambda device: "it is not installed"
    )
    default = StateEngineConfig(dim=512)
    pulse = SimplePulse().stack.mixers["state_engine"]
    assert isinstance(pulse, StateEngineConfig)
    assert chosen(pulse) == ["gated_linear_attention: mosaic_gpu"]
    assert chosen(default) == ["gated_linear_attention: mosaic_gpu"]
    wide = StateEngineConfig(dim=1024, head_dim=128, num_slots=64)
    for config in (pulse, wide):
        assert chosen(config, 1024) == [
            "gated_linear_attention: mosaic_gpu_stretches",
            "gated_linear_attention: mosaic_gpu",
        ]


def test_heads_that_do_not_divide_the_devices_are_refused_only_with_edges() -> None:
    mesh = make_mesh(data=1, seq=4, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        for config in (PLAIN, EDGES):
            module, x = config.build(), jax.ShapeDtypeStruct((3, 24, DIM), jnp.float32)
            if config.has_edges:
                with pytest.raises(ValueError, match="2 heads do not divide among the 4 devices"):
                    jax.eval_shape(module.init, jax.random.key(0), x)
            else:
                jax.eval_shape(module.init, jax.random.key(0), x)


@pytest.mark.slow(days=28, group="costly")
def test_slots_differ_from_the_start() -> None:
    """Routes that start nearly even write the same to all slots: the likeliest of 32 has .15 of a token then."""
    config = StateEngineConfig(dim=64, num_heads=1, num_slots=32)
    x = jax.random.normal(jax.random.key(0), (1, 64, 64))
    drawn = jax.jit(lambda key: nn.meta.unbox(config.build().init(key, x))["params"]["route"]["kernel"])
    scores = np.asarray(x[0]) @ np.asarray(drawn(jax.random.key(1)))[:, 0]
    assert np.median(scipy.special.softmax(scores, -1).max(-1)) > 0.5
