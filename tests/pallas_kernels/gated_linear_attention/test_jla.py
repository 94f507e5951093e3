"""gated_linear_attention by jax-linear-attention: calls that it takes, tokens that do nothing, its kernels on a GPU."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_linear_attention import explain, gated_linear_attention
from pallas_kernels.gated_linear_attention.jla import gated_linear_attention_jla
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.gated_linear_attention.test_gated_linear_attention import call, long_arrays
from tests.pallas_kernels.jla import (
    GPUS,
    HOPPER,
    as_others_write,
    check_errors,
    check_strong_decay,
    installed,
    needs_jla,
    over_devices,
    rows,
    stand_in,
    without_kernels,
)
from tests.pallas_kernels.linear_state import (
    check_finite,
    check_long,
    heads,
    log_gates,
    packed,
    state_case,
)
from tests.pallas_kernels.op_suite import OpCase

LENGTH = 21
KINDS = {"log_gate": "simple_gla", "log_key_gate": "gla"}


def reference(arrays: dict[str, Any]) -> Any:
    return gated_linear_attention(**arrays, output_final_state=True, scale=0.5, implementation="reference")


def adapter(arrays: dict[str, Any]) -> Any:
    return gated_linear_attention_jla(**arrays, output_final_state=True, scale=0.5)


def case(gate: str | None, run: Any, arrays: dict[str, Any]) -> OpCase:
    arrays = arrays | {"segment_ids": packed(arrays["k"].shape[1])}
    if gate is not None:
        like = arrays["v"].shape[:3] if gate == "log_gate" else arrays["k"].shape
        arrays[gate] = log_gates(4, like)
    return state_case(str(gate), run, reference, arrays)


# one function each, as a case's programs are kept by function
CASES = {gate: case(gate, partial(adapter), heads(LENGTH)) for gate in (*KINDS, None)}


@pytest.mark.slow(
    days=28, group="properties of kernels", every=("log_key_gate-reference", "log_key_gate-poison")
)
@pytest.mark.parametrize("check", ["reference", "poison", "shard_map"])
@pytest.mark.parametrize("gate", KINDS)
def test_documents_holes_and_padding(gate: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS[check](CASES[gate])
    assert set(calls.kinds) <= {KINDS[gate]}


@pytest.mark.slow(days=28, group="properties of kernels")
def test_nothing_is_forgotten_without_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS["reference"](CASES[None])
    assert calls.kinds == ["simple_gla"] * len(calls.kinds)


@needs_jla
@pytest.mark.filterwarnings("default")
@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("gate", KINDS)
def test_its_plain_implementation_on_a_mesh(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    with as_others_write():
        op_suite.CHECKS["reference"](over_devices(CASES[gate], 2))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("gate", KINDS)
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay(gate: str, strong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strong_decay(stand_in(monkeypatch), adapter, reference, CASES[gate], gate, strong)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_rows_without_a_token_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    arrays = CASES["log_gate"].arrays
    o, final = adapter({**arrays, "segment_ids": arrays["segment_ids"].at[0].set(0).at[1].set(-3)})
    np.testing.assert_array_equal(final, arrays["initial_state"])
    assert not np.any(o)


HEADS = {"heads": 4, "key_heads": 4, "keys": 128, "values": 128, "length": 4096}


@pytest.mark.parametrize(
    ("gate", "change", "reason"),
    [
        ("log_value_gate", {}, "it has no gates by value channel"),
        ("log_gate", {"keys": 256}, "4 heads of K 256 and V 128 with 4 of keys would be cut"),
        ("log_gate", {"values": 32}, "4 heads of K 128 and V 32 with 4 of keys would be cut, filled up"),
        ("log_gate", {"length": 5_000_000}, "it takes at most 4186048 steps a row"),
        ("log_gate", {"length": 1}, "rows of 1 steps would be filled up to 64"),
        (
            "log_key_gate",
            {"key_heads": 2},
            "4 heads of K 128 and V 128 with 2 of keys would be cut, filled up or repeated",
        ),
        ("log_key_gate", {"heads": 1, "key_heads": 1, "keys": 64}, None),
        ("log_key_gate", {"keys": 64, "values": 512}, None),
        ("log_key_gate", {"length": 2_100_000}, "at most 2092992 steps a row, not 2100000"),
        ("log_gate", {"key_heads": 1}, None),
        ("log_key_gate", {}, None),
    ],
)
def test_what_it_takes(
    gate: str, change: dict[str, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    call = HEADS | change
    q, v = (
        jax.ShapeDtypeStruct((1, call["length"], call[n], call[width]), jnp.bfloat16)
        for n, width in (("key_heads", "keys"), ("heads", "values"))
    )
    shape = {"log_gate": v.shape[:3], "log_key_gate": q.shape, "log_value_gate": v.shape}[gate]
    text = explain(q, q, v, **{gate: jax.ShapeDtypeStruct(shape, jnp.float32)}, device=HOPPER)
    if reason is None:
        assert text == "gated_linear_attention: jla on NVIDIA H200"
    else:
        assert not text.startswith("gated_linear_attention: jla")
        assert reason in text.split("not jla: ")[1]


def test_layers_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, arrays = stand_in(monkeypatch), CASES["log_gate"].arrays

    def layers(arrays: dict[str, Any]) -> Any:
        o, _ = adapter(arrays)
        return adapter(arrays | {"v": o})

    jax.jit(layers).trace(arrays)
    assert calls.kinds == ["simple_gla"]


CUT = [
    # gate, heads, heads of keys, K, V: of them what the package is given
    ("log_key_gate", 4, 4, 64, 512, (16, 16, 64, 128)),  # slots that are read
    ("log_key_gate", 2, 2, 256, 96, (4, 4, 128, 128)),  # wide keys
    ("log_key_gate", 4, 2, 16, 64, (4, 4, 64, 64)),  # few slots, whose keys are shared
    ("log_key_gate", 1, 1, 16, 64, (1, 1, 128, 64)),
    ("log_gate", 4, 2, 200, 130, (16, 4, 128, 128)),
    ("log_gate", 2, 1, 64, 32, (2, 1, 64, 64)),
]
"""Heads of other widths than the package's."""


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("gate", "heads", "key_heads", "keys", "values", "given"), CUT)
def test_heads_are_cut_filled_up_and_repeated(
    gate: str,
    heads: int,
    key_heads: int,
    keys: int,
    values: int,
    given: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = stand_in(monkeypatch)
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), rows(9, heads, key_heads, keys, values))
    op_suite.CHECKS["reference"](case(gate, partial(adapter), arrays))
    q, v = calls.given[0]["q"], calls.given[0]["v"]
    assert (v.shape[2], q.shape[2], q.shape[3], v.shape[3]) == given


GPU_CHECKS = op_suite.CHECKS | {"reference": check_errors}


def on_gpu(arrays: dict[str, Any]) -> Any:
    return gated_linear_attention(**arrays, output_final_state=True, scale=0.5, implementation="jla")


GPU_SHAPES = [
    ("log_gate", 2048, 4, 4, 128, 128),
    ("log_gate", 2001, 8, 1, 128, 64),
    ("log_gate", 100, 16, 4, 64, 128),
    ("log_key_gate", 2048, 4, 4, 128, 128),
    ("log_key_gate", 333, 16, 16, 64, 128),
]


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("check", ["reference", "poison", "vmap", "remat"])
@pytest.mark.parametrize(("gate", "length", "heads", "key_heads", "keys", "values"), GPU_SHAPES)
def test_its_kernels(
    check: str, gate: str, length: int, heads: int, key_heads: int, keys: int, values: int
) -> None:
    with as_others_write():
        GPU_CHECKS[check](case(gate, on_gpu, rows(length, heads, key_heads, keys, values)))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("check", ["reference", "poison", "remat"])
@pytest.mark.parametrize("cut", CUT, ids=str)
def test_its_kernels_on_cut_heads(check: str, cut: tuple[Any, ...]) -> None:
    gate, *widths, _ = cut
    with as_others_write():
        GPU_CHECKS[check](case(gate, on_gpu, rows(333, *widths)))


@needs_jla
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("devices", GPUS)
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize(("gate", "length", "heads", "key_heads", "keys", "values"), GPU_SHAPES[1::2])
def test_its_kernels_on_a_mesh(
    check: str, gate: str, length: int, heads: int, key_heads: int, keys: int, values: int, devices: int
) -> None:
    arrays = rows(length, heads, key_heads, keys, values)
    with as_others_write():
        GPU_CHECKS[check](over_devices(case(gate, on_gpu, arrays), devices))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("gate", KINDS)
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_in_its_kernels(gate: str, strong: float) -> None:
    given = case(gate, on_gpu, rows(2048, 4, 4, 128, 128))
    strong_gates = np.random.default_rng(9).uniform(size=given.arrays[gate].shape) < 0.4
    arrays = {**given.arrays, gate: jnp.where(strong_gates, strong, given.arrays[gate])}
    with as_others_write():
        check_errors(dataclasses.replace(given, arrays=arrays))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("length", [65_536, 131_075])
@pytest.mark.parametrize("gate", KINDS)
def test_long_rows_in_its_kernels(gate: str, length: int) -> None:
    with as_others_write():
        check_long(partial(call, "jla", 64), partial(call, "xla", 32), long_arrays(gate, length, 2, 128))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("gate", KINDS)
def test_a_million_steps_in_its_kernels(gate: str) -> None:
    with as_others_write():
        check_finite(partial(call, "jla", 64), long_arrays(gate, 1 << 20, 1, 128, (-14, 3)))
