"""The Hopper kernel: simulated on the CPU, on a GPU what one device can run, and what it is not asked to do.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.short_conv import bench, short_conv
from pallas_kernels.short_conv.hopper import MOST, STEPS, why_not
from pallas_kernels.short_conv.mosaic_gpu import short_conv_mosaic_gpu
from pallas_kernels.short_conv.shapes import SHAPES, ShortConvShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import normal

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
ALL_STREAMS = ("x", "pre_gate", "post_gate")
SIMULATED = partial(short_conv_mosaic_gpu, interpret=True)


def case(
    name: str, length: int, taps: int, run: Any, *, batch: int = 1, streams: tuple[str, ...] = ALL_STREAMS
) -> OpCase:
    channels = 2
    arrays = {s: normal(i, (batch, channels, length), jnp.bfloat16) for i, s in enumerate(streams)}
    arrays |= {"taps": normal(4, (channels, taps)), "bias": normal(5, (channels,))}
    return OpCase(
        name=name,
        run=lambda arrays: run(**arrays),
        reference=lambda arrays: short_conv(**arrays, implementation="reference"),
        arrays=arrays,
        shared=frozenset({"taps", "bias"}),
        terms=taps + 1,
        grad_terms=2 * length,
    )


def cases(run: Any) -> list[OpCase]:
    return [
        case("one tile", STEPS, 7, run),
        case("two rows, two tiles, the last not full", STEPS + 512, MOST, run, batch=2),
        case("odd length, one tap, no gates", STEPS + 77, 1, run, streams=("x",)),
        case("no pre-gate, three tiles", 3 * STEPS, 3, run, streams=("x", "post_gate")),
    ]


@pytest.mark.slow(days=28, group="properties of kernels", every="one tile")
@pytest.mark.parametrize("case", cases(SIMULATED), ids=str)
def test_simulated(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_under_vmap() -> None:
    op_suite.check_vmap(case("two rows", STEPS, 3, SIMULATED, batch=2))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_rows_of_one_program_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    op_suite.check_reference(case("three rows of full tiles", STEPS, 4, SIMULATED, batch=3))


@pytest.mark.slow(days=28, group="properties of kernels")
def test_a_tap_reaches_over_the_edge_of_a_tile() -> None:
    x = jnp.zeros((1, 1, 2 * STEPS), jnp.bfloat16).at[0, 0, STEPS - 1].set(1)
    y = SIMULATED(x, 1 + jnp.arange(MOST, dtype=jnp.float32)[None])
    np.testing.assert_array_equal(y[0, 0, STEPS - 1 : STEPS - 1 + MOST], 1 + np.arange(MOST))
    assert np.count_nonzero(y) == MOST


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", cases(short_conv_mosaic_gpu), ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "bf16 streams, these are float32"),
        ({"taps": MOST + 1}, "at most 8 taps, not 9"),
        ({"length": STEPS - 1}, "shorter than one tile of 4096 steps"),
        ({"length": STEPS + 8}, "rows of 4104 steps, no multiple of 512, would be copied"),
        ({"history": jax.ShapeDtypeStruct((1, 3, 2), jnp.bfloat16)}, "zero history"),
        ({"segment_ids": jax.ShapeDtypeStruct((1, STEPS), jnp.int32)}, "packed rows"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": STEPS, "dtype": jnp.bfloat16, "taps": 3} | change
    device, length, dtype, taps = (call.pop(name) for name in ("device", "length", "dtype", "taps"))
    x, filter = jax.ShapeDtypeStruct((1, 3, length), dtype), jax.ShapeDtypeStruct((3, taps), jnp.float32)
    assert reason in (why_not(device, x, filter, **call) or "it can run")


@pytest.mark.parametrize(
    "shape", [s for s in SHAPES if s.length % STEPS == 0 and s.documents == 1], ids=lambda s: s.name
)
def test_takes_the_shapes_of_real_models(shape: Any) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    taps = jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)
    assert why_not(HOPPER, x, taps, pre_gate=x, post_gate=x) is None


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("documents", [1, 3])
def test_the_benchmark_passes_its_gate(gated: bool, documents: int) -> None:
    shape = ShortConvShape("tiny", 1, 2, STEPS, 5, gated=gated, documents=documents)
    errors = check(bench.plan(shape, interpret=True), jax.random.key(0))
    assert set(errors) == {"plain", "xla"} | ({"mosaic_gpu"} if documents == 1 else set())
