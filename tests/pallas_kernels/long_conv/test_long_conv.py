"""long_conv: the suite over lengths and packings, transform lengths, reach, causality, errors."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.long_conv import long_conv, long_conv_history
from pallas_kernels.long_conv.fft import fast_length, fft_product
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase, value_and_grads
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    assert_exact_in_f64,
    assert_gradients_are_apart,
    assert_packed_is_apart,
    filter_case,
    normal,
    on_grid,
    ragged,
    streams,
    suite,
)
from tests.sampled import thinned
from tests.tolerances import assert_close


def case(name: str, length: int, taps: int, dtype: Any = jnp.float32, **options: Any) -> OpCase:
    return filter_case(long_conv, name, length, taps, dtype, terms=length, **options)


CASES = [
    case("one step", 1, 4),
    case("prime length, short filter", 307, 31),
    case("filter longer than the row, bf16", 129, 400, jnp.bfloat16),
    case("bidirectional, no gates", 211, 97, causal=False, gates=False),
    case("packed", 300, 300, ids=ragged(300)),
    case("packed, short filter, bidirectional", 45, 20, causal=False, ids=ragged(45)),
    case("on a grid of 50, bidirectional", 330, 330, causal=False, ids=on_grid(330, 50), alignment=50),
    case("on a grid of 144", 500, 400, ids=on_grid(500, 144), alignment=144),
    case("on a grid longer than the row", 90, 90, ids=on_grid(90, 128), alignment=128),
]


@pytest.mark.parametrize(("case", "check"), suite(CASES, thorough="on a grid of 144", poisoned="packed"))
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


MATRIX = list(
    itertools.product(
        [True, False],  # causal
        [1, 2, 130, 700, 5000],  # taps
        [2, 15, 16, 17, 255, 256, 257, 1543],  # length
        [None, 1, 3, 16, 96, 256, 270],  # grid
    )
)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("causal", "taps", "length", "grid"), thinned(MATRIX, 28, tuple))
def test_pairs_of_the_full_matrix(length: int, taps: int, causal: bool, grid: int | None) -> None:
    ids = None if grid is None else ragged(length) if grid == 1 else on_grid(length, grid)
    op_suite.CHECKS["reference"](case("", length, taps, causal=causal, ids=ids, alignment=grid or 1))


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
def test_in_f64_values_and_gradients_are_those_of_the_reference() -> None:
    arrays = streams(301) | {"filter": normal(4, (CHANNELS, 301))}
    assert_exact_in_f64(long_conv, arrays, 600, segment_ids=on_grid(301, 30), segment_alignment=30)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_packed_documents_are_those_of_documents_apart(causal: bool) -> None:
    filter = normal(4, (CHANNELS, 400 if causal else 799))
    arrays = streams(300) | {"filter": filter, "segment_ids": ragged(300)}
    assert_gradients_are_apart(partial(long_conv, causal=causal), arrays, n=600)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_computed_as_if_apart(causal: bool) -> None:
    taps = 401 if causal else 801
    arrays = streams(401) | {"filter": normal(4, (CHANNELS, taps)), "segment_ids": ragged(401)}
    assert_packed_is_apart(partial(long_conv, causal=causal), arrays, n=401)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
@pytest.mark.parametrize(
    ("past", "taps", "steps"), [(0, 5, 7), (40, 1, 3), (40, 90, 33), (61, 17, 5), (7, 20, 50)]
)
def test_history_and_row_give_the_last_outputs_of_both(past: int, taps: int, steps: int) -> None:
    u, filter = normal(0, (2, 3, past + steps)), normal(1, (3, taps))
    before, row = jnp.split(u, [past], axis=2)

    def in_two(before: Any, row: Any, filter: Any) -> Any:
        return long_conv_history(before, filter, steps=steps) + long_conv(row, filter)

    whole = jax.jit(partial(long_conv, implementation="reference"))(u, filter)
    assert_close(jax.jit(in_two)(before, row, filter), np.asarray(whole)[..., past:], n=past + steps)


def test_history_refuses_what_does_not_fit() -> None:
    past = jnp.zeros((1, 2, 4))
    for arrays, steps, says in (
        ((past[0], jnp.zeros((2, 3))), 1, r"past must be \[batch, channels, time\], got shape \(2, 4\)"),
        ((past, jnp.zeros((3, 3))), 1, r"filter must be \[2 channels, taps\], got shape \(3, 3\)"),
        ((past, jnp.zeros((2, 3))), 0, "steps must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            long_conv_history(*arrays, steps=steps)


def test_a_medium_filter_gives_what_blocked_conv_gives() -> None:
    arrays = streams(500) | {"filter": normal(4, (CHANNELS, 200))}
    assert_close(jax.jit(long_conv)(**arrays), jax.jit(blocked_conv)(**arrays), n=200)


@pytest.mark.parametrize("packed", [False, True])
def test_an_impulse_arrives_2000_steps_later(packed: bool) -> None:
    """Within its document, and with no trace in the next."""
    length, impulse, next_document = 2300, 57, 2100
    x = jnp.zeros((1, 1, length)).at[0, 0, impulse].set(1.0)
    filter = normal(0, (1, length))
    ids = (1 + (jnp.arange(length) >= next_document).astype(jnp.int32))[None] if packed else None
    y = np.asarray(jax.jit(long_conv)(x, filter, segment_ids=ids))[0, 0]
    assert_close(y[impulse + 2000], np.asarray(filter)[0, 2000], np.float32, length)
    if packed:
        assert not y[next_document:].any()


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_depend_on_the_past_alone_if_causal(causal: bool) -> None:
    """By gradient, which is exact where a comparison of two FFTs is not: the last step weighs on itself alone."""
    x, filter = normal(0, (1, 2, 40)), normal(1, (2, 40 if causal else 79))
    ids = jnp.ones((1, 40), jnp.int32)
    early = jax.jit(lambda x: jnp.sum(long_conv(x, filter, causal=causal, segment_ids=ids)[..., :20]))
    weight = jax.grad(early)(x)
    assert np.any(np.asarray(weight)[..., 20:]) == (not causal)


def test_fast_lengths_are_the_least_even_5_smooth_numbers() -> None:
    def smooth(n: int) -> bool:
        for p in (2, 3, 5):
            while n % p == 0:
                n //= p
        return n == 1

    for n in (*range(1, 300), 4097, 131071, 10**6 + 3):
        expected = next(m for m in range(max(n + n % 2, 2), 4 * n + 4, 2) if smooth(m))
        assert fast_length(n) == expected


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_long_conv")
@pytest.mark.parametrize("groups", [3, 6])
def test_channel_groups_change_nothing(groups: int) -> None:
    arrays = {"u": normal(0, (2, 6, 3, 50)), "filter": normal(1, (6, 70))}
    spectrum = 8 * 2 * 6 * 3 * 90
    grouped = value_and_grads(
        lambda a: fft_product(**a, rows=40, offset=49, spectrum_bytes=spectrum // groups), arrays
    )
    whole = value_and_grads(lambda a: fft_product(**a, rows=40, offset=49), arrays)
    for got, want in zip(jax.tree.leaves(grouped), jax.tree.leaves(whole), strict=True):
        assert_close(got, want, n=240)


def test_backward_keeps_inputs_and_no_spectra() -> None:
    x, filter = normal(0, (2, CHANNELS, 256), jnp.bfloat16), normal(1, (CHANNELS, 256))
    _, backward = jax.vjp(jax.jit(long_conv), x, filter)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward))
    assert kept <= x.nbytes + filter.nbytes + 64  # and a few scalars


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"filter": jnp.ones((CHANNELS, 4)), "causal": False}, "even number"),
        ({"filter": jnp.ones((5, 4))}, "filter must be"),
        ({"segment_alignment": 0}, "segment_alignment"),
        ({"segment_ids": jnp.ones((2, 8))}, "segment_ids must be integers, got float32"),
        ({"filter": jnp.ones((CHANNELS, 3), jnp.int32)}, "filter must be floating point, got int32"),
        ({"post_gate": jnp.ones((2, CHANNELS, 9))}, "post_gate must have shape"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": jnp.ones((2, CHANNELS, 8)), "filter": jnp.ones((CHANNELS, 3))} | change
    with pytest.raises(ValueError, match=message):
        long_conv(**arguments)
