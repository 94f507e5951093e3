"""The DFT as dense products: the suite, errors beside those of an fp32 FFT, scales, groups, what backward keeps."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.long_conv import long_conv
from pallas_kernels.long_conv.dft import power_of_two, radices, restore, stage_matrices, transform
from pallas_kernels.long_conv.monarch import rather_not_monarch, why_not_monarch
from pallas_kernels.long_conv.monarch_vjp import Form, gated
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.long_conv.test_long_conv import case
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    assert_packed_is_apart,
    normal,
    on_grid,
    ragged,
    streams,
    suite,
)
from tests.tolerances import assert_close

monarch = partial(long_conv, implementation="monarch")
named = partial(case, implementation="monarch")
bf16 = jnp.bfloat16

CASES = [
    named("one step", 1, 4),
    named("packed", 300, 300, bf16, ids=ragged(300)),
    named(
        "on a grid longer than the row", 140, 140, bf16, causal=False, ids=on_grid(140, 144), alignment=144
    ),
]

MORE = [
    named("filter longer than the row, bf16", 150, 400, bf16),
    named("bidirectional, no gates", 211, 97, causal=False, gates=False),
    named("packed, bidirectional", 270, 300, causal=False, ids=ragged(270)),
    named("on a grid of 144", 500, 400, ids=on_grid(500, 144), alignment=144),
]


@pytest.mark.parametrize(
    ("case", "check"), suite(CASES, thorough="on a grid longer than the row", poisoned="packed")
)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(
    ("case", "check"), suite(MORE, thorough="on a grid of 144", poisoned="on a grid of 144")
)
def test_suite_of_long_blocks(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def drawn(length: int, taps: int, causal: bool, size: float) -> dict[str, Any]:
    """Streams of a given size with a random cotangent `dy`, taps of unit energy."""
    arrays = {name: (x * size).astype(bf16) for name, x in streams(length).items() if name != "bias"}
    width = taps if causal else 2 * taps - 1
    filter, bias = normal(4, (CHANNELS, width)) * width**-0.5, normal(3, (CHANNELS,))
    return arrays | {"filter": filter, "bias": bias, "dy": normal(5, (2, CHANNELS, length), bf16)}


@partial(jax.jit, static_argnums=(1, 2))
def outputs(arrays: dict[str, Any], causal: bool, implementation: str) -> dict[str, Any]:
    """Values and gradients; the streams as wide as `filter`."""
    inputs = {name: x for name, x in arrays.items() if name != "dy"}
    y, vjp = jax.vjp(lambda a: long_conv(**a, causal=causal, implementation=implementation), inputs)
    return {"y": y} | vjp(arrays["dy"].astype(y.dtype))[0]


def wide(arrays: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {name: jnp.asarray(np.asarray(x).astype(dtype)) for name, x in arrays.items()}


def errors(length: int, taps: int, causal: bool, size: float) -> dict[str, tuple[float, float]]:
    """Relative errors in norm against f64: ours, and an fp32 FFT's whose results are rounded to bf16."""
    arrays = drawn(length, taps, causal, size)
    ours = outputs(arrays, causal, "monarch")
    again = outputs(arrays, causal, "monarch")
    assert all(np.array_equal(ours[n], again[n]) for n in ours), "the same bits twice"
    rounded = {n: z.astype(bf16) for n, z in outputs(wide(arrays, np.float32), causal, "xla").items()}
    with jax.enable_x64(True):
        truth = {n: np.asarray(z) for n, z in outputs(wide(arrays, np.float64), causal, "xla").items()}

    def error(found: Any, name: str) -> float:
        return float(
            np.linalg.norm(np.asarray(found, np.float64) - truth[name]) / np.linalg.norm(truth[name])
        )

    return {name: (error(ours[name], name), error(rounded[name], name)) for name in truth}


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(
    ("length", "taps", "causal", "size"),
    [
        (1, 3, True, 1.0),
        (13, 13, False, 1.0),
        (1000, 300, True, 1e4),
        (1024, 2000, False, 1e-4),
        (4095, 4095, True, 1.0),
        (8192, 8192, True, 1e4),
        (12_289, 12_289, False, 1.0),
        (32_768, 32_768, True, 1e-4),
        (100_000, 100_000, True, 1.0),
    ],
)
def test_errors_are_near_those_of_rounding_alone(length: int, taps: int, causal: bool, size: float) -> None:
    assert_near_rounding(length, taps, causal, size)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 13, 1000, 1024, 4095, 8192, 12_289, 32_768, 100_000, 1_000_000])
@pytest.mark.parametrize(("causal", "size"), [(True, 1.0), (True, 1e-4), (False, 1e4)])
def test_errors_on_a_gpu(length: int, causal: bool, size: float) -> None:
    assert_near_rounding(length, length, causal, size)


def assert_near_rounding(length: int, taps: int, causal: bool, size: float) -> None:
    """At most 1.5 times; of a few numbers, whose roundings have no mean, 1.5 times what many have."""
    typical = 2.0**-9 if length * CHANNELS < 100 else 0.0
    for name, (ours, rounded) in errors(length, taps, causal, size).items():
        assert ours <= 1.5 * max(rounded, typical), (
            f"{name}: {ours} where rounding an fp32 FFT gives {rounded}"
        )


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_monarch")
def test_packed_documents_are_computed_as_if_apart() -> None:
    arrays = streams(600) | {"filter": normal(4, (CHANNELS, 600)), "segment_ids": ragged(600)}
    assert_packed_is_apart(monarch, arrays, n=600)


@pytest.mark.slow(days=28, group="costly", every=("1", "7", "130"))
@pytest.mark.parametrize("points", [1, 7, 130, 1000])
def test_stages_are_the_transform_of_their_formula_and_undo_themselves(points: int) -> None:
    stages = radices(points) if points != 130 else (8, 3, 6)
    size = math.prod(stages)
    assert size >= points
    u = normal(0, (size, 2))
    matrices = jax.jit(lambda: stage_matrices(stages, jnp.float32))()
    found = jax.jit(transform)(matrices, u)
    order = np.arange(size).reshape(stages[::-1]).T.reshape(-1)
    phase = np.outer(4 * order - 1, np.arange(size)) / (4 * size)
    expected = np.exp(-2j * np.pi * phase) @ np.asarray(u, np.float64) / size**0.5
    assert_close(found, np.stack([expected.real, expected.imag], 1), n=size)
    assert_close(jax.jit(restore)(matrices, found), u, n=size)


def test_radices_waste_little() -> None:
    for points in (300, 1000, 4095, 8192, 12_289, 100_000, 160_000, 10**6):
        assert points <= math.prod(radices(points)) <= 1.07 * points, points
    for points in (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 1 << 20):
        assert math.prod(radices(points)) == points


def test_scales_are_powers_of_two() -> None:
    values = jnp.asarray([0.0, 1.0, 3.0, 1e-30, 1e30, 1e-45], jnp.float32)
    scales = np.asarray(power_of_two(values, 4))
    assert (np.log2(scales) == np.round(np.log2(scales))).all()
    assert scales[0] == 1
    scaled = np.asarray(values)[1:5] * scales[1:5]
    assert ((scaled >= 8) & (scaled < 16)).all()


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_rows_of_any_size_stay_in_range(size: float) -> None:
    """Each row has a scale of its own, and a constant row puts all of it into one number."""
    x = np.ones((2, 1, 2000), np.float32)
    x[1] *= size
    taps = np.ones((1, 2000), np.float32)
    y = np.asarray(jax.jit(monarch)(jnp.asarray(x, bf16), jnp.asarray(taps)), np.float64)
    expected = np.asarray(jnp.asarray(x, bf16), np.float64)[..., :1] * np.arange(1, 2001)
    for row in range(2):
        assert_close(y[row], expected[row], bf16, 2000)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_monarch")
@pytest.mark.parametrize("groups", [3, 6])
def test_channel_groups_change_nothing(groups: int) -> None:
    shape, points = (2, 6, 3, 50), 50
    arrays = {n: normal(i, shape, bf16) for i, n in enumerate(("x", "pre_gate", "post_gate"))}
    arrays |= {"filter": normal(4, (6, 70)), "bias": normal(5, (6,))}
    limit = 8 * 2 * 6 * 3 * points // groups

    def run(spectrum_bytes: int, a: dict[str, Any]) -> Any:
        form = Form(50, 10, bf16, spectrum_bytes)
        return gated(form, *(a[n] for n in ("filter", "bias", "x", "pre_gate", "post_gate")), None)

    grouped, whole = (op_suite.value_and_grads(partial(run, n), arrays) for n in (limit, 2**31))
    for got, want in zip(jax.tree.leaves(grouped), jax.tree.leaves(whole), strict=True):
        assert_close(got, want, bf16, n=150)


def test_groups_run_in_an_island() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, filter = normal(0, (2, 4, 1, 30), bf16), normal(1, (4, 30))
    run = lambda x, filter: gated(Form(30, 0, bf16, 64), filter, None, x, None, None, None)  # noqa: E731
    specs = (jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec())
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0])
    assert_close(jax.jit(split)(x, filter), run(x, filter), bf16, n=30)


def test_backward_keeps_inputs_and_no_spectra() -> None:
    x, filter = normal(0, (2, CHANNELS, 256), bf16), normal(1, (CHANNELS, 256))
    gates = {name: normal(i, x.shape, bf16) for i, name in enumerate(("pre_gate", "post_gate"))}
    ids = jnp.ones((2, 256), jnp.int32)
    run = lambda x, filter, gates: monarch(x, filter, **gates, segment_ids=ids, segment_alignment=256)  # noqa: E731
    _, backward = jax.vjp(jax.jit(run), x, filter, gates)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(backward))
    assert kept <= 3 * x.nbytes + filter.nbytes + ids.nbytes + 64  # and a few scalars


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "None"),
        ({"length": 8191}, "it was timed at 8192 to 1048576 steps, not at 8191"),
        ({"length": 1_048_577}, "it was timed at 8192 to 1048576 steps, not at 1048577"),
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"packed": True}, "packed rows have been timed in it at 8,192 steps alone"),
        ({"device": Device("gpu", (8, 0), "NVIDIA A100")}, "this is NVIDIA A100"),
    ],
    ids=str,
)
def test_goes_before_ffts_where_it_was_timed(change: dict[str, Any], reason: str) -> None:
    hopper = Device("gpu", (9, 0), "NVIDIA H200")
    call: dict[str, Any] = {"device": hopper, "dtype": bf16, "length": 8192, "packed": False} | change
    x, filter = (
        jax.ShapeDtypeStruct((2, 3, call["length"]), call["dtype"]),
        jax.ShapeDtypeStruct((3, 4), jnp.float32),
    )
    ids = jax.ShapeDtypeStruct((2, call["length"]), jnp.int32) if call["packed"] else None
    assert reason in str(rather_not_monarch(call["device"], x, filter, segment_ids=ids))


def test_longest_row() -> None:
    filter = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    longest = jax.ShapeDtypeStruct((1, 1, 2**24 + 1), bf16)
    assert why_not_monarch(None, longest, filter) == "rows of 16777217 steps, at most 16777216"
