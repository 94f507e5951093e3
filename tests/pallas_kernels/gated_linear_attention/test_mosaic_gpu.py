"""The Hopper kernels: simulated on the CPU with races watched, on a GPU what one device can run, and what they refuse.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.gated_linear_attention import explain
from pallas_kernels.gated_linear_attention.hopper import rather_not, why_not
from pallas_kernels.gated_linear_attention.mosaic_gpu import gated_linear_attention_mosaic_gpu
from pallas_kernels.gated_linear_attention.reference import gated_linear_attention_reference
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import (
    log_gates,
    normal,
    packed,
    relative_rms,
)
from tests.pallas_kernels.op_suite import OpCase
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
# Key heads that are shared; places that are filled again; one warpgroup and two.
SMALL = (
    ("log_gate", 64, 128, 1, 2, 140),
    ("log_key_gate", 128, 128, 1, 1, 140),
    ("log_value_gate", 128, 128, 1, 1, 70),
)
# Tiles of keys without as many of values, and the reverse; heads of values in parts.
OTHERS = (
    ("log_gate", 128, 128, 1, 1, 70),
    ("log_gate", 128, 64, 1, 1, 140),
    ("log_key_gate", 64, 128, 1, 1, 140),
    ("log_key_gate", 128, 64, 1, 2, 70),
    ("log_value_gate", 64, 128, 1, 1, 140),
)
# Pieces of wide keys that heads share; gates by head over them, and heads of values in parts.
WIDE = (
    ("log_value_gate", 256, 64, 1, 2, 70),
    ("log_value_gate", 512, 64, 1, 1, 70),
    ("log_gate", 384, 128, 1, 1, 70),
)
# Heads that are filled up: slots that are written, slots that are read.
NARROW = (("log_value_gate", 64, 16, 1, 2, 70), ("log_key_gate", 16, 64, 1, 1, 70))
LARGE = tuple(
    (gate, keys, values, 2, 4, length)
    for gate in ("log_gate", "log_key_gate", "log_value_gate")
    for keys, values, length in ((128, 128, 1000), (64, 64, 512), (64, 256, 777), (128, 64, 777))
)
LARGE_WIDE = (
    ("log_value_gate", 512, 64, 2, 4, 1000),
    ("log_value_gate", 256, 128, 1, 2, 777),
    ("log_gate", 384, 64, 2, 2, 512),
)
LARGE_NARROW = (("log_value_gate", 64, 16, 2, 4, 777), ("log_key_gate", 16, 64, 2, 4, 777))


def arrays_of(
    gate: str, keys: int, values: int, key_heads: int, heads: int, length: int, *, batch: int = 1
) -> dict[str, Any]:
    """Documents and holes, a state that enters, and gates of which one in fifty forgets all beside weak ones.

    What the state adds to the first outputs is as large as the rest: the table is for terms of the result's own size.
    """
    narrow, full = (batch, length, key_heads, keys), (batch, length, heads, values)
    shape = {"log_gate": full[:3], "log_key_gate": narrow, "log_value_gate": full}[gate]
    strong = np.random.default_rng(9).uniform(size=shape) < 0.02
    return {
        "q": normal(0, narrow, jnp.bfloat16),
        "k": normal(1, narrow, jnp.bfloat16) * jnp.asarray(keys**-0.5, jnp.bfloat16),
        "v": normal(2, full, jnp.bfloat16),
        gate: jnp.where(strong, -3000.0, log_gates(4, shape)),
        "initial_state": normal(3, (batch, heads, keys, values)) * 2 * keys**-0.5,
        "segment_ids": packed(length)[:batch],
    }


def case(run: Any, *call: Any, batch: int = 1) -> OpCase:
    arrays, (_, keys, _, _, _, length) = arrays_of(*call, batch=batch), call
    both = {"output_final_state": True, "scale": 0.5}
    return OpCase(
        name="_".join(map(str, call)),
        run=lambda arrays: run(**arrays, **both),
        reference=lambda arrays: gated_linear_attention_reference(**arrays, **both),
        arrays=arrays,
        unused={n: np.asarray(arrays["segment_ids"]) <= 0 for n in ("q", "k", "v", call[0])},
        silent=np.asarray(arrays["segment_ids"]) <= 0,
        terms=length * keys,
        grad_terms=2 * length * keys,
    )


def check_reference(case: OpCase) -> None:
    """Values within the table, and of values and gradients the error that the op's README states for bf16."""
    found, grads = op_suite.value_and_grads(case.run, case.arrays)
    cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), op_suite.random_cotangents(found))
    wide = op_suite._in_fp32(case.arrays)
    expected, expected_grads = op_suite.reference_and_grads(case, wide, cotangents)
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, jnp.bfloat16, case.terms)
        assert relative_rms(got, want) <= 0.005
    for name, want in expected_grads.items():
        assert grads[name].dtype == case.arrays[name].dtype
        assert relative_rms(grads[name], want) <= 0.005, f"gradient of {name}"


def named(call: Any) -> str:
    return "_".join(map(str, call))


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize("call", SMALL, ids=named)
def test_simulated(call: Any, simulation: Any) -> None:
    """Values and gradients."""
    check_reference(case(partial(gated_linear_attention_mosaic_gpu, interpret=simulation), *call))


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize("call", OTHERS, ids=named)
def test_simulated_with_other_tiles(call: Any, simulation: Any) -> None:
    check_reference(case(partial(gated_linear_attention_mosaic_gpu, interpret=simulation), *call))


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize("call", [*WIDE, *NARROW], ids=named)
def test_simulated_with_other_widths(call: Any, simulation: Any) -> None:
    check_reference(case(partial(gated_linear_attention_mosaic_gpu, interpret=simulation), *call))


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_gradient_of_a_gate_in_bfloat16_over_wide_keys(simulation: Any) -> None:
    """It is a sum over value channels, which cancel: rounded to bfloat16 one by one they were .008 off."""
    call = case(
        partial(gated_linear_attention_mosaic_gpu, interpret=simulation), "log_gate", 256, 64, 1, 1, 64
    )
    call.arrays["log_gate"] = call.arrays["log_gate"].astype(jnp.bfloat16)
    check_reference(call)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_linear_attention/test_mosaic_gpu")
def test_simulated_without_a_gate(simulation: Any) -> None:
    """Nothing is forgotten; rows without a token keep their state bit by bit, in which no document begins."""
    arrays = arrays_of(*SMALL[0])
    del arrays["log_gate"]
    arrays["segment_ids"] = jnp.full_like(arrays["segment_ids"], -3)
    run = partial(gated_linear_attention_mosaic_gpu, output_final_state=True, interpret=simulation)
    o, final = run(**arrays)
    np.testing.assert_array_equal(final, arrays["initial_state"])
    assert not np.any(o)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("call", [*LARGE, *LARGE_WIDE, *LARGE_NARROW], ids=named)
def test_on_a_gpu(call: Any, check: str) -> None:
    checks = op_suite.CHECKS | {"reference": check_reference}
    checks[check](case(gated_linear_attention_mosaic_gpu, *call, batch=2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"keys": 640}, "its keys are at most 512 wide, 128 under gates by key channel, not 640"),
        ({"keys": 256, "gate": "log_key_gate"}, "128 under gates by key channel, not 256"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "dtype": jnp.bfloat16, "keys": 128, "gate": "log_gate"}
    device, dtype, keys, gate = (call | change).values()
    q, v = (jax.ShapeDtypeStruct((1, 70, 2, width), dtype) for width in (keys, 128))
    assert reason in (why_not(device, q, q, v, **{gate: q}) or "it can run")


@pytest.mark.parametrize(
    ("shape", "keys", "reason"),
    [
        ((1, 4_194_240, 1), 128, None),
        (
            (1, 4_194_241, 1),
            128,
            "a grid has at most 65535 chunks, rows of 4194240 steps; 4194241 steps are 65536",
        ),
        ((70_000, 64, 8), 512, None),
        ((1, 64, 65_535), 128, None),
        ((1, 64, 65_536), 128, "a grid has at most 65535 programs of heads, 65536 heads are 65536"),
        ((1, 64, 8_192), 512, "a grid has at most 65535 programs of heads, 8192 heads are 65536"),
    ],
)
def test_calls_that_a_grid_does_not_hold_are_refused(
    shape: tuple[int, ...], keys: int, reason: str | None
) -> None:
    """CUDA has 65,535 programs along all but a grid's last axis, which has rows; elements are counted in 64 bits."""
    q, v = (jax.ShapeDtypeStruct((*shape, width), jnp.bfloat16) for width in (keys, 64))
    assert why_not(HOPPER, q, q, v) == reason


@pytest.mark.parametrize(
    ("keys", "values", "gate", "said"),
    [
        (512, 64, "log_value_gate", None),
        (256, 64, None, "keys of more than 128 channels were timed under gates per value channel only"),
        (64, 16, "log_value_gate", None),
        (64, 15, "log_value_gate", "heads of 64 and 15 channels, filled up to 64 and 64, were not timed"),
        (48, 64, "log_value_gate", "heads of 48 and 64 channels, filled up to 64 and 64, were not timed"),
        (48, 64, None, "heads of 48 and 64 channels, filled up to 64 and 64, were not timed"),
        (16, 64, "log_key_gate", None),
        (15, 64, "log_key_gate", "heads of 15 and 64 channels, filled up to 64 and 64, were not timed"),
    ],
)
def test_widths_that_were_timed_go_first(keys: int, values: int, gate: str | None, said: str | None) -> None:
    q, v = (jax.ShapeDtypeStruct((1, 70, 2, width), jnp.bfloat16) for width in (keys, values))
    gates = {gate: q if gate == "log_key_gate" else v} if gate else {}
    assert why_not(HOPPER, q, q, v, **gates) is None
    assert rather_not(HOPPER, q, q, v, **gates) == said


def test_goes_before_xla_but_for_short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pallas_kernels._linear_state.jla.why_not_package", lambda device: "it is not installed"
    )
    x, y = (jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16) for length in (70, 63))
    assert explain(x, x, x, device=HOPPER).startswith("gated_linear_attention: mosaic_gpu on ")
    assert "not mosaic_gpu: rows of 63 steps would be filled up to 64" in explain(y, y, y, device=HOPPER)
