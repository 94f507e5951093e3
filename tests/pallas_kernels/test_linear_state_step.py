"""One step of an op with a matrix of state per head on Hopper: simulated on the CPU with races watched, and refused."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels._linear_state.step import why_not
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule.mosaic_gpu_step import gated_delta_rule_step
from pallas_kernels.gated_linear_attention import explain, gated_linear_attention
from pallas_kernels.gated_linear_attention.mosaic_gpu_step import gated_linear_attention_step
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import log_gates, normal
from tests.pallas_kernels.op_suite import OpCase

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
STEPS = {
    "log_gate": gated_linear_attention_step,
    "log_key_gate": gated_linear_attention_step,
    "log_value_gate": gated_linear_attention_step,
    "beta": gated_delta_rule_step,
}


@pytest.fixture
def simulation(simulation: Any) -> Any:
    """The shared one, in which a kernel finds NaN where it has written nothing."""
    return dataclasses.replace(simulation, uninitialized_memory="nan")


def case(gate: str, run: Any, *, batch: int, keys: int, values: int) -> OpCase:
    """Four rows at a time: a token, a hole, padding, a token whose gate forgets all; two heads of v to one of k."""
    ids = jnp.asarray(np.resize([3, -3, 0, 5], (batch, 1)), jnp.int32)
    narrow, full = (batch, 1, 1, keys), (batch, 1, 2, values)
    shapes = {"log_gate": full[:3], "log_key_gate": narrow, "log_value_gate": full}
    arrays = {
        "q": normal(0, narrow, jnp.bfloat16),
        "k": (normal(1, narrow) * keys**-0.5).astype(jnp.bfloat16),
        "v": normal(2, full, jnp.bfloat16),
        "initial_state": normal(3, (batch, 2, keys, values)),
        "segment_ids": ids,
    }
    name = "log_gate" if gate == "beta" else gate
    arrays[name] = log_gates(4, shapes[name]).at[3::4].set(-jnp.inf)
    if gate == "beta":
        arrays["beta"] = jnp.asarray(np.random.default_rng(5).uniform(0, 2, full[:3]), jnp.float32)
    op: Any = gated_delta_rule if gate == "beta" else gated_linear_attention
    both = {"output_final_state": True, "scale": 0.5}
    return OpCase(
        name=f"{gate}, {batch} rows, {keys} by {values}",
        run=lambda arrays: run(**arrays, **both),
        reference=lambda arrays: op(**arrays, **both, implementation="reference"),
        arrays=arrays,
        unused={n: np.asarray(ids) <= 0 for n in arrays if n not in ("initial_state", "segment_ids")},
        silent=np.asarray(ids) <= 0,
        terms=keys,
        grad_terms=2 * keys,
    )


CALLS = [
    *((gate, "reference") for gate in STEPS),
    pytest.param("beta", "poison", marks=pytest.mark.slow(days=28, group="long")),
]


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/test_linear_state_step")
@pytest.mark.parametrize(("gate", "check"), CALLS)
def test_simulated(gate: str, check: str, simulation: Any) -> None:
    """Values and gradients; whatever lies at holes and padding."""
    run = partial(STEPS[gate], interpret=simulation)
    op_suite.CHECKS[check](case(gate, run, batch=4, keys=16, values=128))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/test_linear_state_step")
def test_simulated_rows_without_a_token_keep_their_state(simulation: Any) -> None:
    """Bit by bit, with values of more than one program."""
    given = case("beta", gated_delta_rule_step, batch=2, keys=8, values=256).arrays
    ids = jnp.asarray([[0], [-2]], jnp.int32)
    arrays = {**given, "segment_ids": ids}
    o, final = gated_delta_rule_step(**arrays, output_final_state=True, interpret=simulation)
    np.testing.assert_array_equal(final, given["initial_state"])
    assert not np.any(o)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize(("keys", "values"), [(128, 128), (64, 256), (256, 128)])
@pytest.mark.parametrize("gate", STEPS)
def test_on_a_gpu(gate: str, keys: int, values: int, check: str) -> None:
    op: Any = gated_delta_rule if gate == "beta" else gated_linear_attention
    run = partial(op, implementation="mosaic_gpu_step")
    op_suite.CHECKS[check](case(gate, run, batch=8, keys=keys, values=values))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, "compute capability 9.0 exactly"),
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"length": 2}, "it takes rows of 1 step, not 2"),
        ({"keys": 20}, "its keys are a multiple of 8 wide, at most 256, not 20"),
        ({"keys": 512}, "its keys are a multiple of 8 wide, at most 256, not 512"),
        ({"values": 64}, "its values are a multiple of 128 wide, not 64"),
        ({"rows": 32_768}, "a grid has at most 65535 heads of rows, 32768 rows of 2 have 65536"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "dtype": jnp.bfloat16, "keys": 128, "values": 128}
    call |= {"rows": 1, "length": 1} | change
    rows = (call["rows"], call["length"], 2)
    q, v = (jax.ShapeDtypeStruct((*rows, call[width]), call["dtype"]) for width in ("keys", "values"))
    device = call["device"]
    assert reason in (why_not(device, q, q, v) or "it can run")


def test_goes_first_for_one_step() -> None:
    x = jax.ShapeDtypeStruct((1, 1, 2, 128), jnp.bfloat16)
    assert why_not(HOPPER, x, x, x) is None
    assert explain(x, x, x, device=HOPPER).startswith("gated_linear_attention: mosaic_gpu_step on ")
