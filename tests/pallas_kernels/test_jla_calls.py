"""Both ops with a matrix of state by jax-linear-attention: tokens that do nothing, strong decay, its GPU kernels."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels import op_suite
from tests.pallas_kernels.jla import (
    GPU_CHECKS,
    GPUS,
    KINDS,
    adapter,
    as_others_write,
    check_errors,
    check_strong_decay,
    jla_case,
    needs_jla,
    on_gpu,
    over_devices,
    rows,
    stand_in,
    without_kernels,
)
from tests.pallas_kernels.linear_state import heads
from tests.pallas_kernels.state_ops import LENGTH, gate_of

CASES = {kind: jla_case(kind, partial(adapter, kind), heads(LENGTH)) for kind in KINDS}
SHAPES = [
    ("log_gate", 2048, 4, 4, 128, 128),
    ("log_gate", 2001, 8, 1, 128, 64),
    ("log_gate", 100, 16, 4, 64, 128),
    ("log_key_gate", 2048, 4, 4, 128, 128),
    ("log_key_gate", 333, 16, 16, 64, 128),
    ("beta", 2048, 4, 4, 128, 128),
    ("beta", 2001, 4, 2, 64, 128),
    ("beta", 100, 16, 4, 128, 64),
    ("beta", 512, 2, 1, 128, 256),
]
"""Kinds, lengths, heads, heads of keys, widths of keys and of values that its kernels take."""


@pytest.mark.slow(
    days=28, group="properties of kernels", every=("log_key_gate-reference", "log_key_gate-poison")
)
@pytest.mark.parametrize("check", ["reference", "poison", "shard_map"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_holes_and_padding(kind: str, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS[check](CASES[kind])
    assert set(calls.kinds) <= {KINDS[kind]}


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("kind", "named"), [("log_gate", "simple_gla"), ("beta", "deltanet")])
def test_nothing_is_forgotten_without_gates(kind: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS["reference"](jla_case(kind, partial(adapter, kind), heads(LENGTH), gated=False))
    assert calls.kinds == [named] * len(calls.kinds)


@needs_jla
@pytest.mark.filterwarnings("default")
@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_its_plain_implementation_on_a_mesh(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    with as_others_write():
        op_suite.CHECKS["reference"](over_devices(CASES[kind], 2))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay(kind: str, strong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strong_decay(stand_in(monkeypatch), kind, CASES[kind], strong)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("kind", ["log_gate", "beta"])
def test_rows_without_a_token_keep_their_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    arrays = CASES[kind].arrays
    ids = arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    o, final = adapter(kind, {**arrays, "segment_ids": ids})
    np.testing.assert_array_equal(final, arrays["initial_state"])
    assert not np.any(o)


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("check", ["reference", "poison", "vmap", "remat"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_kernels(shape: tuple[Any, ...], check: str) -> None:
    kind, *sizes = shape
    with as_others_write():
        GPU_CHECKS[check](jla_case(kind, partial(on_gpu, kind), rows(*sizes)))


@needs_jla
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("devices", GPUS)
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("shape", [*SHAPES[1:7:2], *SHAPES[6::2]], ids=str)
def test_its_kernels_on_a_mesh(shape: tuple[Any, ...], check: str, devices: int) -> None:
    kind, *sizes = shape
    with as_others_write():
        GPU_CHECKS[check](over_devices(jla_case(kind, partial(on_gpu, kind), rows(*sizes)), devices))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_in_its_kernels(kind: str, strong: float) -> None:
    given = jla_case(kind, partial(on_gpu, kind), rows(2048, 4, 4, 128, 128))
    gate = given.arrays[gate_of(kind)]
    pattern = np.random.default_rng(9).uniform(size=gate.shape) < 0.4
    arrays = {**given.arrays, gate_of(kind): jnp.where(pattern, strong, gate)}
    with as_others_write():
        check_errors(dataclasses.replace(given, arrays=arrays))
