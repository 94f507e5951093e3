"""Attention against a loop over queries in float64, rotary positions by complex rotation."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import StackConfig
from jaxblt.parallel import batch_sharding, make_mesh
from jaxblt.testing import Subject
from jaxblt.testing.parallel import check_sequence
from jaxblt.training.stored.serialize import from_json, to_json
from pallas_kernels import _jax_triton
from pallas_kernels.attention import triton_gpu
from pallas_kernels.attention.rules import Custom, Global, Interval, PrefixLM, Strided
from pallas_kernels.runtime import Device, compiling_for, record_choices
from tests.parameters import drawn
from tests.tolerances import assert_close

BASE = AttentionConfig(dim=12, num_heads=6, num_kv_heads=3, head_dim=4, rope_theta=100.0)
UNTURNED = AttentionConfig(dim=12, num_heads=6, num_kv_heads=3, head_dim=4, position="none")
CASES = {
    "rope": BASE,
    "window": dataclasses.replace(BASE, window=4, num_kv_heads=1),
    "alibi": dataclasses.replace(UNTURNED, position="alibi"),
    "alibi_alone": dataclasses.replace(UNTURNED, position="alibi", packed=False),
    "none_both": dataclasses.replace(UNTURNED, causal=False),
    "window_both": dataclasses.replace(BASE, window=4, causal=False),
    "rope_alone": dataclasses.replace(BASE, packed=False, rope_scale=2.0),
    "rule": dataclasses.replace(BASE, rule=Interval(2, 0) | Global(every=4)),
    "rule_both": dataclasses.replace(BASE, causal=False, rule=~Strided(3)),
    "both_alone": dataclasses.replace(BASE, packed=False, causal=False),
}


def turn(x: np.ndarray, theta: float, scale: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / scale * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([z.real, z.imag], -1)


def naive_row(config: AttentionConfig, params: dict, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """One row, one query and one head at a time."""
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params["params"].items()}
    q, k, v = (np.einsum("td,dhk->thk", x.astype(np.float64), w[name]) for name in "qkv")
    if config.position == "rope":
        q, k = (turn(a, config.rope_theta, config.rope_scale) for a in (q, k))
    slopes = [2.0 ** (-8 * (h + 1) / config.num_heads) for h in range(config.num_heads)]
    shared, out = config.num_heads // config.groups, np.zeros(x.shape)
    for t in range(len(x)):
        for h in range(config.num_heads):
            distance = t - np.arange(len(x))
            seen = (ids == ids[t]) & (ids > 0)
            if config.causal:
                seen &= distance >= 0
            if config.window is not None:
                seen &= np.abs(distance) < config.window
            if config.rule is not None:
                time = np.arange(len(x)) - np.argmax(np.abs(ids) == abs(ids[t]))
                seen &= config.rule.sees(time[t], time)
            if not seen.any():
                continue
            scores = k[:, h // shared] @ q[t, h] / np.sqrt(config.width)
            if config.position == "alibi":
                scores = scores - slopes[h] * distance
            p = np.where(seen, np.exp(scores - scores[seen].max()), 0)
            out[t] += (p @ v[:, h // shared] / p.sum()) @ w["out"][h]
    return out


@pytest.mark.slow(days=21)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name: str) -> None:
    config = CASES[name]
    subject = Subject(config, length=14)
    for ids in (subject.documents(), subject.with_holes(subject.documents())):
        y = subject.run(ids=ids)
        expected = np.stack(
            [naive_row(config, subject.params, *row) for row in zip(subject.x, ids, strict=True)]
        )
        live = ids > 0
        assert_close(y[live], expected[live], jnp.float32, n=subject.length * config.dim)


def test_parameters_are_named_and_shaped() -> None:
    params = jax.eval_shape(BASE.build().init, jax.random.key(0), jnp.zeros((1, 2, 12)))["params"]
    assert params["q"]["kernel"].names == ("embed", "heads", "head_dim")
    assert params["k"]["kernel"].names == ("embed", "kv_heads", "head_dim")
    assert params["out"]["kernel"].names == ("heads", "head_dim", "embed")
    shapes = jax.tree.map(jnp.shape, nn.meta.unbox(params))
    assert shapes["q"]["kernel"] == (12, 6, 4)
    assert shapes["v"]["kernel"] == (12, 3, 4)


@pytest.mark.slow(days=28, group="costly")
def test_a_far_stream_equals_a_near_one() -> None:
    """Positions given at 2 million give what positions at 0 give: only differences count."""
    config = dataclasses.replace(BASE, window=5)
    subject = Subject(config, length=14)
    state, far = subject.start(), np.full((subject.rows, 1), 2_000_000, np.int32)
    step = jax.jit(
        lambda x, positions, state: subject.module.apply(subject.params, x, positions=positions, state=state)
    )
    outputs = []
    for t in range(subject.length):
        y, state = step(jnp.asarray(subject.x[:, t : t + 1]), jnp.asarray(far + t), state)
        outputs.append(np.asarray(y))
    assert_close(np.concatenate(outputs, 1), subject.run(), jnp.float32, n=subject.length * config.dim)
    np.testing.assert_array_equal(state.clock.position, 2_000_014)
    np.testing.assert_array_equal(state.clock.time, 14)


@pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_attention")
@pytest.mark.parametrize("window", [None, 3])
def test_over_a_split_sequence_nothing_is_gathered(window: int | None) -> None:
    """Projections, rotary angles, the exchange and all gradients: none of them needs the whole sequence."""
    module = dataclasses.replace(BASE, window=window).build()
    x, ids = jnp.ones((2, 32, BASE.dim)), jnp.ones((2, 32), jnp.int32)
    params = drawn(module, x)
    mesh = make_mesh(data=2, seq=4)

    def backward(params, x, ids, dy):
        y, back = jax.vjp(lambda p, x: module.apply(p, x, segment_ids=ids)[0], params, x)
        return y, back(dy)

    with jax.set_mesh(mesh):
        placed = jax.device_put((x, ids, x), batch_sharding(mesh))
        text = jax.jit(backward).lower(params, *placed).compile().as_text() or ""
    assert " collective-permute(" in text
    assert not re.search(r" all-(gather|to-all)\(", text)


def test_a_rule_for_both_directions_does_not_fit_a_causal_stack() -> None:
    prefix = dataclasses.replace(BASE, causal=False, rule=PrefixLM(4))
    stack = StackConfig(dim=12, pattern=("prefix",), mixers={"prefix": prefix})
    with pytest.raises(ValueError, match="shows later keys"):
        stack.mixer("prefix")


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"rule": Interval(63) | Strided(64)}, "triton"),
        ({"rule": ~Strided(3), "causal": False}, "triton"),
        ({"rule": Global(first=4)}, "xla"),
        ({"rule": Global(first=4), "packed": False}, "triton"),
    ],
    ids=["distances", "both", "places", "one document"],
)
def test_rules_of_packed_rows_run_on_triton(
    changes: dict, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, unless a rule reads places in documents, which are arrays then."""
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    monkeypatch.setattr(triton_gpu, "_attend", lambda plan, q, *_: q)
    config = AttentionConfig(dim=128, num_heads=2, **changes)
    x, ids = jnp.zeros((1, 256, 128), jnp.bfloat16), jnp.ones((1, 256), jnp.int32)
    module = config.build(dtype=jnp.bfloat16)
    with compiling_for(Device("gpu", (9, 0), "NVIDIA H200")), record_choices() as chosen:
        jax.eval_shape(lambda: module.init(jax.random.key(0), x, segment_ids=ids))
    assert [line.split(" on ")[0] for line in chosen] == [f"attention: {kernel}"]


def test_rules_are_stored_by_their_parts() -> None:
    rule = (Interval(2, 0) | Global(every=4)) & ~Strided(3)
    config = dataclasses.replace(BASE, rule=rule)
    assert from_json(to_json(config)) == config
    with pytest.raises(TypeError, match=r"config\.rule\.fn is a function"):
        to_json(dataclasses.replace(BASE, rule=Custom(lambda q, k: q >= k)))


@pytest.mark.slow(days=28, group="further properties of mixers")
def test_a_rule_over_eight_devices() -> None:
    check_sequence(Subject(CASES["rule"], length=48), counts=(8,))
