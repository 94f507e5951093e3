"""gated_delta_rule by jax-linear-attention: calls that it takes, tokens that do nothing, its kernels on a GPU."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_rule import explain, gated_delta_rule
from pallas_kernels.gated_delta_rule.jla import gated_delta_rule_jla
from tests.pallas_kernels import op_suite
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
from tests.pallas_kernels.linear_state import heads, log_gates, packed, state_case
from tests.pallas_kernels.op_suite import OpCase

LENGTH = 21


def reference(arrays: dict[str, Any]) -> Any:
    return gated_delta_rule(**arrays, output_final_state=True, scale=0.5, implementation="reference")


def adapter(arrays: dict[str, Any]) -> Any:
    return gated_delta_rule_jla(**arrays, output_final_state=True, scale=0.5)


def case(name: str, run: Any, arrays: dict[str, Any], *, gated: bool = True) -> OpCase:
    batch, length, heads, _ = arrays["v"].shape
    arrays = arrays | {"segment_ids": packed(length)}
    beta = np.random.default_rng(5).uniform(0, 2, (batch, length, heads))
    arrays["beta"] = jnp.asarray(beta, jnp.float32)
    if gated:
        arrays["log_gate"] = log_gates(4, (batch, length, heads))
    return state_case(name, run, reference, arrays)


GATED = case("gated", adapter, heads(LENGTH))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_delta_rule/test_jla")
@pytest.mark.parametrize("check", ["reference", "poison", "shard_map"])
def test_documents_holes_and_padding(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS[check](GATED)
    assert set(calls.kinds) <= {"gated_deltanet"}


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_delta_rule/test_jla")
def test_nothing_is_forgotten_without_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    op_suite.CHECKS["reference"](case("no gates", partial(adapter), heads(LENGTH), gated=False))
    assert calls.kinds == ["deltanet"] * len(calls.kinds)


@needs_jla
@pytest.mark.filterwarnings("default")
def test_its_plain_implementation_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    with as_others_write():
        op_suite.CHECKS["reference"](over_devices(GATED, 2))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_delta_rule/test_jla")
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay(strong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    check_strong_decay(stand_in(monkeypatch), adapter, reference, GATED, "log_gate", strong)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_rows_without_a_token_keep_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    ids = GATED.arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    o, final = adapter({**GATED.arrays, "segment_ids": ids})
    np.testing.assert_array_equal(final, GATED.arrays["initial_state"])
    assert not np.any(o)


def test_the_output_comes_alone_without_a_final_state(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    q, k, v, beta = (GATED.arrays[n] for n in ("q", "k", "v", "beta"))
    assert gated_delta_rule_jla(q, k, v, beta).shape == v.shape
    assert calls.given[0]["segment_ids"] is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"dtype": jnp.float16}, "it takes bf16 streams, these are float16"),
        ({"keys": 96}, r"it takes heads of K, V in [(64, 64), "),
        ({"values": 512}, "not (128, 512)"),
        ({"length": 5_000_000}, "it takes at most 4186048 steps a row, not 5000000"),
        ({"length": 1}, "rows of 1 steps would be filled up to 64"),
    ],
)
def test_what_it_does_not_take(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    call = {"keys": 128, "values": 128, "length": 4096, "dtype": jnp.bfloat16} | change

    def stream(heads: int, width: int) -> Any:
        return jax.ShapeDtypeStruct((1, call["length"], heads, width), call["dtype"])

    q, v = stream(2, call["keys"]), stream(4, call["values"])
    text = explain(q, q, v, jax.ShapeDtypeStruct(v.shape[:3], jnp.float32), device=HOPPER)
    taken = "mosaic_gpu_step" if call["length"] == 1 else "xla"
    assert text.startswith(f"gated_delta_rule: {taken} on NVIDIA H200 (not jla: ")
    assert reason in text


def test_it_goes_first_inside_shard_map(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    told = []

    def local(x: Any, beta: Any) -> Any:
        told.append(explain(x, x, x, beta, device=HOPPER))
        return x

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("data")
    x, beta = jnp.zeros((2, 64, 1, 64), jnp.bfloat16), jnp.zeros((2, 64, 1))
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec), x, beta)
    assert told[0].startswith("gated_delta_rule: jla on NVIDIA H200")


GPU_CHECKS = op_suite.CHECKS | {"reference": check_errors}


def on_gpu(arrays: dict[str, Any]) -> Any:
    return gated_delta_rule(**arrays, output_final_state=True, scale=0.5, implementation="jla")


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("check", ["reference", "poison", "vmap", "remat"])
@pytest.mark.parametrize(
    ("length", "heads", "key_heads", "keys", "values"),
    [(2048, 4, 4, 128, 128), (2001, 4, 2, 64, 128), (100, 16, 4, 128, 64), (512, 2, 1, 128, 256)],
)
def test_its_kernels(check: str, length: int, heads: int, key_heads: int, keys: int, values: int) -> None:
    arrays = rows(length, heads, key_heads, keys, values)
    with as_others_write():
        GPU_CHECKS[check](case("kernels", on_gpu, arrays))


@needs_jla
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("devices", GPUS)
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("shape", [(2048, 4, 4, 128, 128), (2001, 4, 2, 64, 128), (512, 2, 1, 128, 256)])
def test_its_kernels_on_a_mesh(check: str, shape: tuple[int, ...], devices: int) -> None:
    with as_others_write():
        GPU_CHECKS[check](over_devices(case("mesh", on_gpu, rows(*shape)), devices))


@needs_jla
@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_in_its_kernels(strong: float) -> None:
    given = case("strong", on_gpu, rows(2048, 4, 4, 128, 128))
    gate = given.arrays["log_gate"]
    strong_gates = np.random.default_rng(9).uniform(size=gate.shape) < 0.4
    arrays = {**given.arrays, "log_gate": jnp.where(strong_gates, strong, gate)}
    with as_others_write():
        check_errors(dataclasses.replace(given, arrays=arrays))
