"""Mixers with a matrix of state per head against loops over tokens in f64."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit as sigmoid

from jaxblt.mixers import (
    DualDecayConfig,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    StateEngineConfig,
)
from jaxblt.mixers.linear.matrix_state import Decay
from jaxblt.models import StackConfig
from jaxblt.models.stack import Stack
from jaxblt.testing import Subject
from tests.tolerances import assert_close

Weights = dict[str, Any]
SHAPE: dict[str, Any] = {
    "num_heads": 2,
    "num_key_heads": 1,
    "head_dim": 6,
    "value_head_dim": 4,
    "chunk_size": 8,
}
DELTA = GatedDeltaNetConfig(dim=6, **SHAPE)
NEGATIVE = GatedDeltaNetConfig(dim=6, **SHAPE, allow_negative_eigenvalues=True)


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def stream(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """silu of the short convolution of one document's projection, [T, H, K]."""
    z, taps = np.einsum("td,dhk->thk", x, w["streams"][name]["kernel"]), w["streams"][f"{name}_taps"]
    y = np.zeros_like(z)
    for lag in range(taps.shape[-1]):
        y[lag:] += taps[..., lag] * z[: len(z) - lag]
    return silu(y)


def decay(w: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    dt = np.log1p(np.exp(x @ w["decay"]["step"]["kernel"] + w["decay"]["bias"]))
    return np.exp(-np.exp(w["decay"]["log_rate"]) * dt), dt


def read_out(w: Weights, o: np.ndarray, x: np.ndarray) -> np.ndarray:
    w = w["readout"]
    o = o / np.sqrt(np.mean(o**2, -1, keepdims=True) + 1e-6) * w["norm"]["scale"]
    o = o * silu(np.einsum("td,dhv->thv", x, w["gate"]["kernel"]))
    return np.einsum("thv,hvd->td", o, w["out"]["kernel"])


def delta(w: Weights, x: np.ndarray, reach: float) -> np.ndarray:
    (q, k, v), (a, _) = (stream(w, name, x) for name in "qkv"), decay(w, x)
    q, k = (z / np.sqrt(np.sum(z**2, -1, keepdims=True) + 1e-6) for z in (q, k))
    beta, o = reach * sigmoid(x @ w["beta"]["kernel"]), np.zeros_like(v)
    for h in range(v.shape[1]):
        memory = np.zeros((k.shape[2], v.shape[2]))
        for t in range(len(x)):
            memory = a[t, h] * (memory - beta[t, h] * np.outer(k[t, 0], k[t, 0] @ memory))
            memory = memory + beta[t, h] * np.outer(k[t, 0], v[t, h])
            o[t, h] = q[t, 0] @ memory
    return read_out(w, o, x)


def gated(w: Weights, x: np.ndarray) -> np.ndarray:
    q, k, v = (stream(w, name, x) for name in "qkv")
    gate = np.einsum("td,dr,rjk->tjk", x, w["gate_in"]["kernel"], w["gate_out"]["kernel"])
    a, o = sigmoid(gate + w["gate_out"]["bias"]) ** (1 / 16), np.zeros_like(v)
    for h in range(v.shape[1]):
        memory = np.zeros((k.shape[2], v.shape[2]))
        for t in range(len(x)):
            memory = a[t, 0][:, None] * memory + np.outer(k[t, 0], v[t, h])
            o[t, h] = q[t, 0] @ memory / np.sqrt(k.shape[2])
    return read_out(w, o, x)


def mamba2(w: Weights, x: np.ndarray) -> np.ndarray:
    (c, b, v), (a, dt) = (stream(w, name, x) for name in "qkv"), decay(w, x)
    o = np.zeros_like(v)
    for h in range(v.shape[1]):
        memory = np.zeros((b.shape[2], v.shape[2]))
        for t in range(len(x)):
            memory = a[t, h] * memory + dt[t, h] * np.outer(b[t, 0], v[t, h])
            o[t, h] = c[t, 0] @ memory + w["skip"][h] * v[t, h]
    return read_out(w, o, x)


def dual(w: Weights, x: np.ndarray) -> np.ndarray:
    """Without a recurrence: weights of all pairs, each step's divided by their sum."""
    q, k, v = (np.einsum("td,dhk->thk", x, w[name]["kernel"]) for name in "qkv")
    q, k = (np.where(z > 0, z + 1, np.exp(z)) for z in (q, k))
    ago = np.arange(len(x))[:, None] - np.arange(len(x))[None]
    o = np.zeros((len(x), 2 * v.shape[1], v.shape[2]))
    for i, rate in enumerate(sigmoid(w["decay"])):
        weights = np.where(ago >= 0, q[:, i // 2] @ k[:, i // 2].T * rate ** np.maximum(ago, 0), 0)
        o[:, i] = weights / weights.sum(1, keepdims=True) @ v[:, i // 2]
    return np.einsum("thk,hkd->td", o, w["out"]["kernel"])


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(
    ("config", "loop"),
    [
        (DELTA, lambda w, x: delta(w, x, 1)),
        (NEGATIVE, lambda w, x: delta(w, x, 2)),
        (GatedLinearAttentionConfig(dim=6, gate_rank=3, **SHAPE), gated),
        (Mamba2Config(dim=6, head_dim=4, state_dim=5, chunk_size=8), mamba2),
        (DualDecayConfig(dim=6, num_heads=2, chunk_size=8), dual),
    ],
    ids=["delta", "delta_negative", "gated", "mamba2", "dual_decay"],
)
def test_equals_the_loop(config: MixerConfig, loop: Callable[[Weights, np.ndarray], np.ndarray]) -> None:
    subject = Subject(config)
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), subject.params["params"])
    ids, expected = subject.documents(), np.zeros(subject.x.shape)
    for row, document in {(r, s) for r in range(len(ids)) for s in ids[r] if s}:
        span = ids[row] == document
        expected[row, span] = loop(w, subject.x[row, span].astype(np.float64))
    assert_close(subject.run(ids=ids), expected, jnp.float32, n=subject.length * 6)


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_matrix_state")
def test_decays_start_near_one() -> None:
    """As those of Mamba-2 do: a bias that is reset to zero gives exp(-A log 2), at most a half."""
    x = jax.random.normal(jax.random.key(0), (1, 64, 128))
    (log_gate, dt), params = Decay(64, jnp.float32).init_with_output(jax.random.key(1), x)
    decays = np.exp(np.asarray(log_gate))
    assert np.median(decays) > 0.8
    assert np.mean(decays > 0.98) > 0.1
    bias = jax.nn.softplus(params["params"]["bias"].unbox())
    assert float(bias.min()) >= 0.999e-3
    assert float(bias.max()) <= 0.1001
    assert float(dt.min()) > 0


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_a_layer_has_heads_that_remember_and_heads_that_forget(heads: int) -> None:
    """Of heads whose decays are drawn all may forget within a few tokens."""
    init = jax.jit(Decay(heads, jnp.float32).init)
    params = nn.meta.unbox(init(jax.random.key(0), jnp.zeros((1, 1, 8))))["params"]
    tokens = 1 / (jnp.exp(params["log_rate"]) * jax.nn.softplus(params["bias"]))
    assert tokens.shape == (heads,)
    assert float(tokens[0]) == pytest.approx(1000, rel=1e-3)
    assert np.all(np.diff(tokens) < 0)
    if heads > 1:
        assert float(tokens[-1]) == pytest.approx(10, rel=1e-3)


def test_the_delta_rule_replaces_what_it_held_at_a_key() -> None:
    """One key, written twice with b = 1 and no decay: the second value alone is read, in its own size."""
    from jaxblt.mixers.driver.marks import mark
    from jaxblt.mixers.linear.gated_delta_net import DeltaRule

    key = jnp.array([0.6, 0.8])[None, None, None]
    q = k = jnp.tile(key, (1, 3, 1, 1))
    v = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 1, 5)), jnp.float32)
    beta, log_gate = jnp.ones((1, 3, 1)), jnp.zeros((1, 3, 1))
    o = jax.jit(lambda *streams: DeltaRule(4).run(streams, mark(None), None)[0])(q, k, v, beta, log_gate)
    assert_close(o, v, jnp.float32, n=8)


def test_words_of_the_stack_build() -> None:
    for name in ("gated_delta_net", "gated_linear_attention", "mamba2", "dual_decay"):
        config = StackConfig(dim=64, num_layers=2, pattern=(name, "W"))
        assert config.mixer(name).dim == 64
        config.mixer(name).build()


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_matrix_state")
@pytest.mark.parametrize("config", [GatedDeltaNetConfig, GatedLinearAttentionConfig, StateEngineConfig])
def test_queries_and_keys_start_as_pairs_are_found_by(config: Any) -> None:
    """Keys that start as a mixture with tokens before, or unlike queries, hide which token they belong to."""
    init = config(dim=8, num_heads=2).build().init
    drawn = jax.jit(lambda key: nn.meta.unbox(init(key, jnp.zeros((1, 4, 8))))["params"]["streams"])
    streams = jax.tree.map(np.asarray, drawn(jax.random.key(0)))
    for name, start in (("q", (1, 0, 0, 0)), ("k", (0.5, 0.5, 0, 0)), ("v", (1, 0, 0, 0))):
        taps = streams[f"{name}_taps"]
        assert np.all(np.abs(taps - np.array(start)) < 0.25), name
        assert np.all(np.std(taps, (0, 1)) > 0), name
    kernels = [streams[name]["kernel"] for name in "qkv"]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert np.all(kernels[0] != kernels[2])
    assert np.all(kernels[0][:, 0] != kernels[0][:, 1])
    assert 0.2 < np.std(kernels[0]) < 0.5


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_matrix_state")
def test_keys_of_one_tap_start_at_the_token_itself() -> None:
    init = GatedDeltaNetConfig(dim=8, num_heads=2, short_taps=1).build().init
    streams = nn.meta.unbox(jax.jit(init)(jax.random.key(0), jnp.zeros((1, 4, 8))))["params"]["streams"]
    assert np.all(np.abs(streams["k_taps"] - 1) < 0.5)


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_matrix_state")
def test_layers_of_a_stack_start_unlike_each_other() -> None:
    """A key that layers share, to draw queries and keys alike, would make them copies."""
    mixers = {"D": GatedDeltaNetConfig(dim=8, num_heads=2)}
    stack = StackConfig(dim=8, num_layers=2, pattern="D", mixers=mixers)
    drawn = nn.meta.unbox(jax.jit(Stack(stack).init)(jax.random.key(0), jnp.zeros((1, 4, 8))))
    leaves = jax.tree.leaves_with_path(drawn)
    queries = [x for path, x in leaves if "['streams']['q']" in jax.tree_util.keystr(path)]
    layers = np.concatenate([np.asarray(x).reshape(-1, 8, 2, 4) for x in queries])
    assert len(layers) == 2
    assert np.all(layers[0] != layers[1])


@pytest.mark.slow(days=28, group="costly", turn="mixers/linear/test_matrix_state")
def test_rows_of_one_chunk_are_those_of_several() -> None:
    """Of so many rows, scanned, XLA made something else where a chunk had no state to read."""

    x = jax.random.normal(jax.random.key(1), (64, 32, 64))

    def stack(chunk: int) -> Stack:
        mixers = {"2": Mamba2Config(dim=64, state_dim=64, chunk_size=chunk)}
        return Stack(StackConfig(dim=64, num_layers=2, pattern="2", mixers=mixers, mlp_dim=0))

    params = jax.jit(stack(32).init)(jax.random.key(0), x[:1])
    whole, halves = (
        jax.jit(lambda params, x, s=stack(n): s.apply(params, x)[0])(params, x) for n in (32, 16)
    )
    assert_close(whole, halves, n=32 * 64)
