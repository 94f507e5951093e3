"""short_conv: the suite, streaming, packing, and errors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import short_conv
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    assert_exact_in_f64,
    assert_packed_is_apart,
    conv_case,
    normal,
    ragged,
    streams,
    suite,
)
from tests.tolerances import assert_close, tol


def call(implementation: Any, arrays: dict[str, Any]) -> Any:
    return short_conv(**arrays, implementation=implementation)


def case(
    name: str, length: int, taps: int, dtype: Any = jnp.float32, *, packed: bool, history: bool, gates: bool
) -> OpCase:
    arrays = streams(length, dtype, gates=gates) | {"taps": normal(4, (CHANNELS, taps))}
    if packed:
        arrays["segment_ids"] = ragged(length)
    if history:
        arrays["history"] = normal(5, (*arrays["x"].shape[:2], taps - 1), dtype)
    return conv_case(name, partial(call, None), partial(call, "reference"), arrays, terms=taps + 1)


PACKED = "4 taps, packed, history"

CASES = [
    case("3 taps", 37, 3, packed=False, history=False, gates=True),
    case("7 taps, one step, history", 1, 7, packed=False, history=True, gates=False),
    case(PACKED, 53, 4, packed=True, history=True, gates=True),
    case("7 taps, packed, bf16", 61, 7, jnp.bfloat16, packed=True, history=False, gates=True),
]


@pytest.mark.parametrize(
    ("case", "check"), suite(CASES, thorough="4 taps, packed, history", poisoned="4 taps, packed, history")
)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def test_in_f64_values_and_gradients_are_those_of_the_reference() -> None:
    arrays = streams(29) | {"taps": normal(4, (CHANNELS, 5))}
    assert_exact_in_f64(short_conv, arrays, 64, segment_ids=ragged(29))


@pytest.mark.parametrize("chunks", [[1] * 20, [7, 7, 6]])
def test_any_split_with_history_is_the_whole(chunks: list[int]) -> None:
    arrays = streams(20)
    taps = normal(4, (CHANNELS, 4))
    whole = jax.jit(short_conv)(**arrays, taps=taps)
    u = arrays["x"] * arrays["pre_gate"]
    u = jnp.pad(u, ((0, 0), (0, 0), (3, 0)))
    run = jax.jit(short_conv)
    outputs, start = [], 0
    for chunk in chunks:
        now = slice(start, start + chunk)
        part = {n: a[..., now] if a.ndim == 3 else a for n, a in arrays.items()}
        outputs.append(run(**part, taps=taps, history=u[..., start : start + 3]))
        start += chunk
    assert_close(jnp.concatenate(outputs, -1), whole, n=4)


def test_packed_documents_are_computed_as_if_apart() -> None:
    arrays = streams(53) | {"taps": normal(4, (CHANNELS, 5)), "segment_ids": ragged(53)}
    assert_packed_is_apart(short_conv, arrays, n=5)


def test_history_does_not_reach_the_second_document() -> None:
    x, taps = jnp.zeros((1, CHANNELS, 6)), jnp.ones((CHANNELS, 7))
    ids, history = jnp.array([[4, 4, 9, 9, 9, 9]]), jnp.ones((1, CHANNELS, 6))
    y = jax.jit(short_conv)(x, taps, segment_ids=ids, history=history)
    np.testing.assert_array_equal(y[0, 0], [6, 5, 0, 0, 0, 0])


def test_output_has_the_dtype_of_x_and_sums_are_wide() -> None:
    x = jnp.full((1, 1, 7), 1.0, jnp.bfloat16)
    taps = jnp.array([[1.0] + [2.0**-9] * 6])
    y = short_conv(x, taps)
    assert y.dtype == jnp.bfloat16
    exact = 1 + 6 * 2.0**-9
    assert abs(float(y[0, 0, 6]) - exact) < tol(jnp.bfloat16)["rtol"] / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"taps": jnp.ones((5, 3))}, "taps must be"),
        ({"x": jnp.ones((2, 4))}, "x must be"),
        ({"x": jnp.ones((2, CHANNELS, 8), jnp.int32)}, "floating point"),
        ({"history": jnp.ones((2, CHANNELS, 5))}, "history must have shape"),
        ({"segment_ids": jnp.ones((2, 9), jnp.int32)}, "segment_ids must have shape"),
        ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers, got float32"),
        ({"taps": jnp.ones((CHANNELS, 3), jnp.int32)}, "taps must be floating point, got int32"),
        ({"pre_gate": jnp.ones((2, 8, CHANNELS))}, "pre_gate must have shape"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": jnp.ones((2, CHANNELS, 8)), "taps": jnp.ones((CHANNELS, 3))} | change
    with pytest.raises(ValueError, match=message):
        short_conv(**arguments)
