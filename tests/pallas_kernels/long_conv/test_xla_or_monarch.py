"""FFTs without derivatives, dense products with them: which of both runs, and the suite."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.long_conv import long_conv
from pallas_kernels.long_conv.xla_or_monarch import rather_not_xla_or_monarch
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import equations
from tests.pallas_kernels.long_conv.test_long_conv import case
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import on_grid, suite

bf16 = jnp.bfloat16
run = partial(long_conv, implementation="xla_or_monarch")
named = partial(case, implementation="xla_or_monarch")

CASES = [
    named("both ways, no gates", 150, 211, bf16, causal=False, gates=False),
    named("on a grid", 140, 140, bf16, ids=on_grid(140, 70), alignment=70),
]


@pytest.mark.parametrize(("case", "check"), suite(CASES, thorough="on a grid", poisoned="on a grid"))
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.fixture
def arrays() -> dict[str, Any]:
    given = CASES[1].arrays
    return {name: given[name] for name in ("x", "filter", "bias", "pre_gate", "post_gate")}


def test_values_alone_are_those_of_xla(arrays: dict[str, Any]) -> None:
    named = [jax.jit(partial(long_conv, implementation=name))(**arrays) for name in ("xla_or_monarch", "xla")]
    np.testing.assert_array_equal(*named)


@pytest.mark.parametrize("remat", [False, True])
def test_no_row_is_transformed_by_fft_where_gradients_are_taken(arrays: dict[str, Any], remat: bool) -> None:
    op = (lambda arrays: run(**arrays)) if not remat else jax.checkpoint(lambda arrays: run(**arrays))

    def transforms(function: Any) -> bool:
        names = {e.primitive.name for e in equations(jax.make_jaxpr(function)(arrays).jaxpr)}
        return "fft" in names

    assert transforms(op)
    assert not transforms(lambda arrays: jax.vjp(op, arrays)[1](arrays["x"]))


def test_backward_keeps_inputs_alone(arrays: dict[str, Any]) -> None:
    _, backward = jax.vjp(jax.jit(lambda arrays: run(**arrays)), arrays)
    kept = sum(z.nbytes for z in jax.tree.leaves(backward))
    assert kept <= sum(z.nbytes for z in arrays.values()) + 64  # and a few scalars


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "None"),
        ({"rows": 33}, "it was timed with at most 32 rows of 8,192 to 32,768 steps"),
        ({"length": 8191}, "it was timed with at most 32 rows of 8,192 to 32,768 steps"),
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"device": Device("cpu")}, "this is cpu"),
    ],
    ids=str,
)
def test_goes_first_where_its_forms_were_timed(change: dict[str, Any], reason: str) -> None:
    hopper = Device("gpu", (9, 0), "NVIDIA H200")
    call: dict[str, Any] = {"device": hopper, "dtype": bf16, "length": 8192, "rows": 32} | change
    shape = (1, call["rows"], call["length"])
    x, filter = jax.ShapeDtypeStruct(shape, call["dtype"]), jax.ShapeDtypeStruct((shape[1], 4), jnp.float32)
    assert reason in str(rather_not_xla_or_monarch(call["device"], x, filter))
