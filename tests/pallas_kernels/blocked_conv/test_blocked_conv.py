"""blocked_conv: the suite over filter lengths and packings, Toeplitz matrices, reach, errors."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._conv.toeplitz import toeplitz, toeplitz_product
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.blocked_conv.xla import block_size
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    assert_exact_in_f64,
    assert_packed_is_apart,
    filter_case,
    normal,
    on_grid,
    ragged,
    streams,
    suite,
)
from tests.sampled import thinned


def case(name: str, length: int, taps: int, dtype: Any = jnp.float32, **options: Any) -> OpCase:
    return filter_case(blocked_conv, name, length, taps, dtype, terms=taps, **options)


CASES = [
    case("1 tap, one step", 1, 1),
    case("128 taps, prime length", 307, 128),
    case("129 taps, bidirectional, no gates", 400, 129, causal=False, gates=False),
    case("100 taps, packed", 293, 100, ids=ragged(293)),
    case("130 taps, packed, bidirectional", 210, 130, causal=False, ids=ragged(210)),
    case("128 taps, on the grid", 450, 128, ids=on_grid(450, 128), alignment=128),
    case("60 taps, on the grid, bidirectional", 450, 60, causal=False, ids=on_grid(450, 128), alignment=128),
    case("90 taps, packed, bf16", 200, 90, jnp.bfloat16, ids=ragged(200)),
]


@pytest.mark.parametrize(
    ("case", "check"), suite(CASES, thorough="128 taps, on the grid", poisoned="100 taps, packed")
)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


MATRIX = list(
    itertools.product(
        [True, False],  # causal
        [1, 2, 17, 127, 128, 129, 255, 300, 512],  # taps
        [2, 16, 17, 127, 128, 129, 640, 1031],  # length
        ["none", "ragged", "grid"],  # packing
    )
)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("causal", "taps", "length", "packing"), thinned(MATRIX, 28, tuple))
def test_pairs_of_the_full_matrix(length: int, taps: int, causal: bool, packing: str) -> None:
    block = block_size(taps, 10**6)
    ids = {"none": None, "ragged": ragged(length), "grid": on_grid(length, block)}[packing]
    alignment = block if packing == "grid" else 1
    op_suite.CHECKS["reference"](case("", length, taps, causal=causal, ids=ids, alignment=alignment))


@pytest.mark.slow(days=28, group="properties of kernels")
def test_in_f64_values_and_gradients_are_those_of_the_reference() -> None:
    arrays = streams(100) | {"filter": normal(4, (CHANNELS, 40))}
    assert_exact_in_f64(blocked_conv, arrays, 300, segment_ids=ragged(100))


@pytest.mark.slow(days=28, group="properties of kernels", every="False")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_computed_as_if_apart(causal: bool) -> None:
    arrays = streams(300) | {"filter": normal(4, (CHANNELS, 151)), "segment_ids": ragged(300)}
    assert_packed_is_apart(partial(blocked_conv, causal=causal), arrays, n=151)


@pytest.mark.parametrize(
    ("rows", "columns", "offset"), [(4, 4, 0), (4, 6, 6), (5, 3, 2), (3, 3, -3), (2, 2, 40)]
)
def test_toeplitz_matrix_is_its_definition(rows: int, columns: int, offset: int) -> None:
    taps = np.asarray(normal(0, (2, 7)))
    expected = np.zeros((2, rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            if 0 <= offset + i - j < 7:
                expected[:, i, j] = taps[:, offset + i - j]
    found = jax.jit(lambda taps: toeplitz(taps, rows, columns, offset))(taps)
    np.testing.assert_array_equal(found, expected)


def test_filter_gradient_in_bf16_is_summed_wide() -> None:
    """In bf16 alone, 256 + 1 = 256: sums over steps would stand still."""
    u = jnp.ones((1, 1, 64, 16), jnp.bfloat16)
    total = jax.jit(lambda h: jnp.sum(toeplitz_product(h, u, rows=16, offset=0)))
    gradient = jax.grad(total)(jnp.zeros((1, 16)))
    np.testing.assert_array_equal(gradient[0], 64 * np.arange(16, 0, -1))


def test_filter_reaches_its_last_tap_and_no_further() -> None:
    x = jnp.zeros((1, 1, 700)).at[0, 0, 100].set(1.0)
    filter = 1 + jnp.arange(512, dtype=jnp.float32)[None]
    y = np.asarray(blocked_conv(x, filter))[0, 0]
    np.testing.assert_array_equal(y[100:612], filter[0])
    assert not y[:100].any()
    assert not y[612:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": jnp.ones((CHANNELS, 513))}, "use long_conv"),
        ({"filter": jnp.ones((CHANNELS, 4)), "causal": False}, "even number"),
        ({"filter": jnp.ones((5, 4))}, "filter must be"),
        ({"segment_alignment": 0}, "segment_alignment"),
        ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers, got float32"),
        ({"filter": jnp.ones((CHANNELS, 3), jnp.int32)}, "filter must be floating point, got int32"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": jnp.ones((2, CHANNELS, 8)), "filter": jnp.ones((CHANNELS, 3))} | change
    with pytest.raises(ValueError, match=message):
        blocked_conv(**arguments)
