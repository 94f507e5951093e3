"""The Triton kernel: interpreted on the CPU where triton is installed, run on a GPU, and what it is not asked to do."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import _jax_triton
from pallas_kernels._dispatch import Device
from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv.triton_gpu import PAIRS, short_conv_triton
from pallas_kernels.short_conv.triton_reach import AHEAD, ODD, reach
from pallas_kernels.short_conv.triton_why import MOST, SHORTEST, why_not
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase, value_and_grads
from tests.pallas_kernels.short_conv import interpreted
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    conv_case,
    no_token,
    normal,
    not_tokens,
    ragged,
    streams,
)

AMPERE = Device("gpu", (8, 0), "NVIDIA A100")
HOPPER = Device("gpu", (9, 0), "NVIDIA H200")

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_jax_triton = pytest.mark.skipif(find_spec("jax_triton") is None, reason="jax-triton is not installed")


def case(
    name: str, length: int, taps: int, dtype: Any, run: Any, *, without: tuple[str, ...] = (), **given: bool
) -> OpCase:
    arrays = streams(length, dtype) | {"taps": normal(4, (CHANNELS, taps))}
    arrays = {name: array for name, array in arrays.items() if name not in without}
    if given.get("packed"):
        arrays["segment_ids"] = ragged(length)
    if given.get("history"):
        arrays["history"] = normal(5, (*arrays["x"].shape[:2], taps - 1), dtype)
    return conv_case(
        name,
        lambda arrays: run(**arrays),
        lambda arrays: short_conv(**arrays, implementation="reference"),
        arrays,
        terms=taps + 1,
    )


def cases(run: Any) -> list[OpCase]:
    """Even and odd numbers of steps and of taps, in one program a row and in two."""
    tile = 2 * PAIRS
    gates = ("pre_gate", "post_gate", "bias")
    return [
        case("packed, history", 53, 4, jnp.float32, run, packed=True, history=True),
        case("bf16, two tiles, history", tile + 6, MOST, jnp.bfloat16, run, history=True),
        case(
            "bf16, two tiles, packed, odd, no gates",
            tile + 5,
            7,
            jnp.bfloat16,
            run,
            without=gates,
            packed=True,
        ),
        case("bf16, two tiles, odd, history", tile + 3, 3, jnp.bfloat16, run, history=True),
        case("bf16, two tiles, packed, gates", tile + 5, 4, jnp.bfloat16, run, packed=True, history=True),
        case("one step, history, no gates", 1, 7, jnp.float32, run, without=gates, history=True),
        case("one tap, odd", 3, 1, jnp.bfloat16, run, history=True),
        case("two taps, no post-gate", 10, 2, jnp.float32, run, without=("post_gate",)),
        case(
            "packed, history, no pre-gate",
            40,
            3,
            jnp.float32,
            run,
            without=gates[:1],
            packed=True,
            history=True,
        ),
    ]


def assert_odd_rows_keep_to_themselves(length: int, packed: bool) -> None:
    """NaN in one row changes no bit of the rows that share a pair of memory with it.

    Three rows, so that the last pair of all reaches past the end.
    """
    whole = case("odd", length, 4, jnp.bfloat16, short_conv_triton, packed=packed, history=True)
    arrays = {n: z if n in whole.shared else z[:1] for n, z in whole.arrays.items()}
    streams = ("x", "pre_gate", "post_gate", "history")
    dy = normal(9, arrays["x"].shape, jnp.bfloat16)
    clean = value_and_grads(whole.run, arrays, dy)
    for rows in ([1], [0, 2]):
        others = np.setdiff1d(range(CHANNELS), rows)
        poisoned = arrays | {n: arrays[n].at[:, rows].set(jnp.nan) for n in streams}
        found = value_and_grads(whole.run, poisoned, dy.at[:, rows].set(jnp.nan))
        assert np.isnan(np.asarray(found[0], np.float32)[:, rows]).any(), "nothing was poisoned"
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
            axis = max(got.ndim - 2, 0)
            np.testing.assert_array_equal(*(np.take(np.asarray(z), others, axis) for z in (got, want)))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels imported meanwhile are interpreted, and those imported before or after are not."""
    name = "pallas_kernels.short_conv.triton_kernel"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(triton_call=interpreted.triton_call))
    monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module(name)
    yield
    del sys.modules[name]


@pytest.mark.slow(days=28, group="properties of kernels", every="packed, history")
@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("case", cases(short_conv_triton), ids=str)
def test_interpreted(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="properties of kernels", every="poison")
@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"reference"}))
def test_interpreted_under_transformations(check: str) -> None:
    op_suite.CHECKS[check](cases(short_conv_triton)[0])


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("packed", [False, True])
def test_odd_rows_keep_to_themselves(packed: bool) -> None:
    assert_odd_rows_keep_to_themselves(31, packed)


def short_documents(length: int) -> Any:
    """Documents of three steps whose ids end in the same 24 bits; one row begins with a hole, one with padding."""
    ids = 2**31 - 1 - (np.arange(length) // 3 << 24)
    ids = np.where(np.arange(length) % 7 == 5, -ids, ids)
    ids[length // 2 : length // 2 + 2] = 0
    rows = np.stack([ids, np.roll(ids, 1)]).astype(np.int32)
    rows[0, 0], rows[1, :2] = -rows[0, 1], 0
    return jnp.asarray(rows)


@needs_triton
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("check", ["reference", "poison"])
@pytest.mark.parametrize("without", [(), ("pre_gate", "post_gate", "bias")], ids=["gates", "no gates"])
@pytest.mark.parametrize("length", [38, 39])
def test_documents_shorter_than_the_taps(length: int, without: tuple[str, ...], check: str) -> None:
    base = case("short", length, 6, jnp.float32, short_conv_triton, without=without, history=True)
    arrays = base.arrays | {"segment_ids": short_documents(length)}
    op_suite.CHECKS[check](replace(base, arrays=arrays, unused=not_tokens(arrays), silent=no_token(arrays)))


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_packed_rows_may_be_batched() -> None:
    """Ids alone, and with the streams: each group finds its own words, of rows that begin amid a pair too."""
    x, taps = normal(0, (2, 2, 3, 11)), normal(1, (3, 4))
    ids = jnp.stack([short_documents(11), short_documents(11)[::-1]])
    for axis in (None, 0):

        def run(op: Any, x: Any, ids: Any) -> Any:
            y, vjp = jax.vjp(lambda x, taps: op(x, taps, segment_ids=ids), x, taps)
            return y, vjp(y)

        args = (x[0] if axis is None else x, ids)
        ours, theirs = (
            jax.vmap(partial(run, op), (axis, 0))(*args) for op in (short_conv_triton, short_conv)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)


@needs_triton
@pytest.mark.usefixtures("interpreter")
def test_weights_alone_or_streams_alone_may_be_batched() -> None:
    x, taps = normal(0, (2, 3, 9)), normal(1, (2, 3, 4))
    for axes in ((None, 0), (0, None)):
        args = (x if axes[0] is None else jnp.stack([x, 2 * x]), taps[0] if axes[1] is None else taps)
        ours, theirs = (jax.vmap(run, axes)(*args) for run in (short_conv_triton, short_conv))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/short_conv/test_triton")
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize(
    ("taps", "length", "dtype", "more"),
    [
        (1, 61, np.int32, 0),
        (2, 60, np.int32, 40_000),
        (MOST, 61, np.int32, 0),
        (MOST, 5, np.int8, 0),
        (MOST, 61, np.int8, 0),
    ],
)
def test_reach_has_a_bit_for_each_step_that_counts(
    taps: int, length: int, dtype: Any, more: int, history: bool
) -> None:
    ids = (np.array(ragged(length)) + np.sign(ragged(length)) * more).astype(dtype)
    ids[1, 0] = -ids[1, 1]
    words = np.asarray(reach(jnp.asarray(ids), taps, history=history))
    assert words.shape == (2, 1 + length % 2, (length + 1) // 2)
    halves = np.stack([words & 0xFFFF, words >> ODD], axis=-1).reshape(*words.shape[:2], -1)
    for first, of_rows in enumerate(halves.swapaxes(0, 1)):
        outside = np.r_[0:first, first + length : halves.shape[-1]]
        assert not of_rows[:, outside].any(), "bits of steps outside the row"
        for row, found in zip(ids, of_rows[:, first : first + length], strict=True):
            np.testing.assert_array_equal(found, [step_bits(row, t, taps, history) for t in range(length)])


def step_bits(row: Any, t: int, taps: int, history: bool) -> int:
    """What `reach` should say of step t, from its definition."""
    if row[t] <= 0:
        return 0
    before = [row[t - k] if t >= k else history * abs(row[0]) for k in range(1, taps)]
    after = [row[t + k] if t + k < len(row) else 0 for k in range(1, taps)]
    places = [0]
    places += [1 + i for i, other in enumerate(before) if other == row[t]]
    places += [AHEAD + 1 + i for i, other in enumerate(after) if other == row[t]]
    return sum(1 << place for place in places)


@pytest.mark.gpu
@needs_triton
@needs_jax_triton
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", cases(short_conv_triton), ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.gpu
@needs_triton
@needs_jax_triton
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [2 * PAIRS - 1, 8191])
def test_odd_rows_keep_to_themselves_on_a_gpu(length: int, packed: bool) -> None:
    assert_odd_rows_keep_to_themselves(length, packed)


@pytest.mark.gpu
@needs_triton
@needs_jax_triton
def test_gradients_on_a_gpu_repeat_bit_for_bit() -> None:
    whole = cases(short_conv_triton)[1]
    first, second = (value_and_grads(whole.run, whole.arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.gpu
@needs_triton
@needs_jax_triton
def test_on_a_gpu_inside_shard_map() -> None:
    whole = cases(partial(short_conv, implementation="triton"))[1]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    specs = {n: PartitionSpec() if n in whole.shared else PartitionSpec("data") for n in whole.arrays}
    run = jax.shard_map(whole.run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("data"))
    found, expected = value_and_grads(run, whole.arrays), value_and_grads(whole.run, whole.arrays)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("cpu")}, "8.0 or newer, this is cpu"),
        ({"device": Device("gpu", (7, 5), "Tesla T4")}, "8.0 or newer, this is Tesla T4"),
        ({"device": Device("gpu", None, "AMD Instinct MI300X")}, "NVIDIA GPUs"),
        ({"dtype": jnp.float16}, "bf16 and fp32 streams, these are float16"),
        ({"history": jax.ShapeDtypeStruct((1, 3, 2), jnp.float64)}, "these are bfloat16, float64"),
        ({"taps": MOST + 1}, "at most 8 taps, not 9"),
        ({"length": SHORTEST - 1}, "rows are shorter than 1024"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    call: dict[str, Any] = {"device": HOPPER, "dtype": jnp.bfloat16, "taps": 3, "length": SHORTEST} | change
    device, dtype, taps, length = (call.pop(name) for name in ("device", "dtype", "taps", "length"))
    x, filter = jax.ShapeDtypeStruct((1, 3, length), dtype), jax.ShapeDtypeStruct((3, taps), jnp.float32)
    assert reason in (why_not(device, x, filter, **call) or "it can run")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_takes_any_length_packed_and_with_history(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    for length in (SHORTEST, 4097):
        arrays = case("any", length, MOST, dtype, None, packed=True, history=True).arrays
        assert why_not(AMPERE, **arrays) is None


def test_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: None if name == "jax_triton" else name)
    x, taps = normal(0, (1, 3, SHORTEST)), normal(1, (3, 3))
    assert why_not(AMPERE, x, taps) == "jax_triton not found (pip install 'jaxblt[triton]')"


def test_asked_for_on_a_cpu_it_says_why_not() -> None:
    with pytest.raises(
        ValueError, match="implementation 'triton' cannot run here: it is compiled for NVIDIA"
    ):
        short_conv(normal(0, (1, 3, 8)), normal(1, (3, 3)), implementation="triton")
