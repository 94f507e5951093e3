"""Rows that do not fit on chip: classes simulated with races watched, and long rows on a GPU."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels.long_conv import long_conv, mosaic_gpu, mosaic_gpu_outer
from pallas_kernels.long_conv.mosaic_gpu_outer import classes_of
from pallas_kernels.runtime import compiling_for
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import HOPPER, equations
from tests.pallas_kernels.long_conv.test_mosaic_gpu import (
    IN_SHARD_MAP,
    assert_near_rounding,
    case,
    drawn,
    halves,
    named,
    outputs,
    simulated,
)
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import normal
from tests.tolerances import assert_close

bf16 = jnp.bfloat16
BOTH = ("pre_gate", "post_gate")


@pytest.fixture
def by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows go the way of long ones, with as few classes as they have tiles."""
    monkeypatch.setattr(mosaic_gpu, "LONGEST_ON_CHIP", 0)
    monkeypatch.setattr(mosaic_gpu_outer, "GRID", 1)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("shape", "taps", "causal", "gates", "size"),
    [
        pytest.param((1, 1, 300), 300, True, BOTH, 1.0, id="one class"),
        pytest.param((3, 2, 9000), 9000, False, BOTH, 1e-4, id="three classes, both ways"),
        pytest.param((1, 3, 8192), 300, True, ("pre_gate",), 1e4, id="fewer taps"),
        pytest.param((2, 1, 5000), 9000, True, ("post_gate",), 1.0, id="more taps"),
        pytest.param((2, 2, 5000), 9000, False, (), 1.0, id="more taps, both ways"),
    ],
)
def test_simulated(
    shape: tuple[int, int, int], taps: int, causal: bool, gates: tuple[str, ...], size: float
) -> None:
    assert_near_rounding(simulated, drawn(shape, taps, causal=causal, gates=gates, size=size), causal)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_in_halves() -> None:
    arrays = drawn((2, 2, 9000), 9000, causal=False, gates=BOTH, size=1e4)
    assert_near_rounding(partial(simulated, dtype=jnp.float16), arrays, False)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("batch", [1, 3])
def test_simulated_channels_of_one_program(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few programs wanted, channels follow one another in each warpgroup, an odd number of them."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    assert_near_rounding(simulated, drawn((batch, 5, 5000), 5000, causal=True, gates=BOTH), True)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_a_row_of_zeros_bounds_no_sum() -> None:
    """The taps' gradient is scaled by the rows that there are."""
    arrays = drawn((2, 1, 5000), 5000, causal=True, gates=BOTH, size=1e-4)
    assert_near_rounding(simulated, arrays | {"x": arrays["x"].at[0].set(0)}, True)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_groups_of_channels_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn((1, 4, 5000), 300, causal=True, gates=BOTH) | {"dy": normal(5, (1, 4, 5000), bf16)}
    whole = outputs(simulated, arrays, True)
    monkeypatch.setattr(mosaic_gpu_outer, "GROUP_BYTES", 4 * 8192 * 4 // 2)
    grouped = outputs(simulated, arrays, True)
    for name, z in whole.items():
        assert_close(grouped[name], z, z.dtype, n=5000)


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_rows_of_any_size_stay_in_range(size: float) -> None:
    """Each row has a scale of its own, and a constant row puts all of it into one number."""
    x = np.ones((2, 1, 5000), np.float32)
    x[1] *= size
    y = np.asarray(jax.jit(simulated)(jnp.asarray(x, bf16), jnp.ones((1, 5000))), np.float64)
    expected = np.asarray(jnp.asarray(x, bf16), np.float64)[..., :1] * np.arange(1, 5001)
    for row in range(2):
        assert_close(y[row], expected[row], bf16, 5000)


@pytest.mark.parametrize(("length", "classes"), [(32_769, 16), (65_536, 16), (160_000, 40), (10**6, 248)])
def test_classes(length: int, classes: int) -> None:
    assert classes_of(length) == classes


def test_few_long_rows_are_cut_over_programs() -> None:
    """One of eight devices has 32 rows of a million steps and 1,024 channels: in either pass enough for four waves."""
    x, filter = jax.ShapeDtypeStruct((1, 32, 10**6), bf16), jax.ShapeDtypeStruct((32, 10**6), jnp.float32)

    def loss(x: Any, filter: Any) -> Any:
        return jnp.sum(long_conv(x, filter).astype(jnp.float32))

    with compiling_for(HOPPER):
        program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, filter)
    kernels = [e for e in equations(program.jaxpr) if e.primitive.name == "mpmd_map"]
    programs = [math.prod(mesh.grid) for kernel in kernels for mesh in kernel.params["meshes"]]
    assert len(programs) == 2
    assert min(programs) >= _hopper.PROGRAMS


@pytest.mark.gpu
@pytest.mark.parametrize("length", [40_000, 65_536, 100_000, 160_000, 1_000_000])
@pytest.mark.parametrize(
    ("causal", "size", "share"), [(True, 1e-4, 1.0), (True, 1e4, 0.3), (False, 1.0, 1.5)]
)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("run", [named, halves], ids=["vjp", "half"])
def test_errors_on_a_gpu(length: int, causal: bool, size: float, share: float, batch: int, run: Any) -> None:
    arrays = drawn((batch, 6, length), int(share * length), causal=causal, gates=BOTH, size=size)
    assert_near_rounding(run, arrays, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("gates", [(), ("pre_gate",), ("post_gate",)])
def test_some_gates_on_a_gpu(gates: tuple[str, ...]) -> None:
    """Few programs, so that channels follow one another in each warpgroup."""
    assert_near_rounding(named, drawn((2, 384, 40_000), 40_000, causal=True, gates=gates), True)


def cases(run: Any) -> list[OpCase]:
    return [
        case("three classes", 9000, 4000, run),
        case(
            "two classes, both ways", 5000, 6000, run, batch=1, channels=1, causal=False, gates=("post_gate",)
        ),
    ]


@pytest.mark.usefixtures("no_races", "by_classes")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("case", cases(simulated), ids=str)
def test_simulated_values_and_gradients(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_classes")
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize(
    "case",
    cases(partial(long_conv, implementation="mosaic_gpu_vjp")),
    ids=str,
)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.usefixtures("by_classes")
@pytest.mark.parametrize("run", IN_SHARD_MAP)
def test_inside_shard_map(run: Any) -> None:
    op_suite.check_shard_map(cases(run)[0])
