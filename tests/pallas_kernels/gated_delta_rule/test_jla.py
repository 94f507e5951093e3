"""gated_delta_rule by jax-linear-attention: calls that it takes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_rule import explain
from pallas_kernels.gated_delta_rule.jla import gated_delta_rule_jla
from tests.pallas_kernels.jla import HOPPER, installed, stand_in
from tests.pallas_kernels.linear_state import heads
from tests.pallas_kernels.state_ops import LENGTH, with_gates


def test_the_output_comes_alone_without_a_final_state(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    q, k, v, beta = (with_gates("beta", heads(LENGTH))[n] for n in ("q", "k", "v", "beta"))
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
