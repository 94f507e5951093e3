"""gated_linear_attention by jax-linear-attention: calls that it takes, heads of other widths than its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_linear_attention import explain
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.jla import (
    GPU_CHECKS,
    HOPPER,
    adapter,
    as_others_write,
    installed,
    jla_case,
    needs_jla,
    on_gpu,
    rows,
    stand_in,
)
from tests.pallas_kernels.linear_state import heads
from tests.pallas_kernels.state_ops import LENGTH, with_gates

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
    calls, arrays = stand_in(monkeypatch), with_gates("log_gate", heads(LENGTH))

    def layers(arrays: dict[str, Any]) -> Any:
        o, _ = adapter("log_gate", arrays)
        return adapter("log_gate", arrays | {"v": o})

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
    op_suite.CHECKS["reference"](jla_case(gate, partial(adapter, gate), arrays))
    q, v = calls.given[0]["q"], calls.given[0]["v"]
    assert (v.shape[2], q.shape[2], q.shape[3], v.shape[3]) == given


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("check", ["reference", "poison", "remat"])
@pytest.mark.parametrize("cut", CUT, ids=str)
def test_its_kernels_on_cut_heads(check: str, cut: tuple[Any, ...]) -> None:
    gate, *widths, _ = cut
    with as_others_write():
        GPU_CHECKS[check](jla_case(gate, partial(on_gpu, gate), rows(333, *widths)))
