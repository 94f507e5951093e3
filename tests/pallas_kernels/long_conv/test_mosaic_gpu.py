"""The Hopper kernel: simulated on the CPU with races watched, on a GPU the suite, and what it is not asked to do.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.long_conv import explain, long_conv
from pallas_kernels.long_conv.hopper import LONGEST, Ring, why_not
from pallas_kernels.long_conv.mosaic_gpu import long_conv_mosaic_gpu
from pallas_kernels.long_conv.shapes import SHAPES
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import normal

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
bf16 = jnp.bfloat16
simulated = partial(long_conv_mosaic_gpu, interpret=True)
named = partial(long_conv, implementation="mosaic_gpu")

ALL_STREAMS = ("x", "pre_gate", "post_gate")


def drawn(
    shape: tuple[int, int, int], taps: int, *, causal: bool, gates: tuple[str, ...], size: float = 1.0
) -> dict[str, Any]:
    """x and some gates of a given size, taps of unit energy, a bias."""
    arrays = {
        n: (normal(i, shape) * size).astype(bf16) for i, n in enumerate(ALL_STREAMS) if n in ("x", *gates)
    }
    width = taps if causal else 2 * taps - 1
    filter, bias = normal(4, (shape[1], width)) * width**-0.5, normal(3, (shape[1],))
    return arrays | {"filter": filter, "bias": bias}


def assert_near_rounding(run: Any, arrays: dict[str, Any], causal: bool) -> None:
    """At most 1.5 times the error of an fp32 FFT rounded to bf16, in norm against f64; the same bits twice."""
    compiled = jax.jit(lambda arrays: run(**arrays, causal=causal))
    ours = compiled(arrays)
    assert np.array_equal(ours, compiled(arrays)), "the same bits twice"

    def transformed(dtype: Any) -> Any:
        wide: Any = {n: jnp.asarray(np.asarray(z).astype(dtype)) for n, z in arrays.items()}
        return long_conv(**wide, causal=causal, implementation="xla")

    rounded = transformed(np.float32).astype(bf16)
    with jax.enable_x64(True):
        truth = np.asarray(transformed(np.float64))
    error = lambda z: np.linalg.norm(np.asarray(z, np.float64) - truth) / np.linalg.norm(truth)  # noqa: E731
    assert error(ours) <= 1.5 * error(rounded), (
        f"{error(ours)} where rounding an fp32 FFT gives {error(rounded)}"
    )


@pytest.mark.slow(weeks=8, every="four rows in a tile")
@pytest.mark.parametrize(
    ("shape", "taps", "causal", "gates", "size"),
    [
        pytest.param((8, 1, 1000), 300, True, ("pre_gate", "post_gate"), 1e-4, id="four rows in a tile"),
        pytest.param((2, 1, 1500), 2000, False, ("post_gate",), 1.0, id="two rows in a tile, both ways"),
        pytest.param((3, 2, 130), 130, True, ("pre_gate",), 1e4, id="a short row in a tile"),
        pytest.param((4, 1, 4095), 4095, True, (), 1.0, id="a tile a row"),
        pytest.param((3, 1, 8192), 8192, True, ("pre_gate", "post_gate"), 1e4, id="two classes"),
        pytest.param((1, 2, 12_289), 9000, False, ("pre_gate", "post_gate"), 1e-4, id="four classes"),
        pytest.param((2, 1, 17_000), 9000, False, ("post_gate",), 1.0, id="five tiles of six"),
        pytest.param((2, 1, LONGEST), LONGEST, True, ("pre_gate", "post_gate"), 1e-4, id="eight tiles"),
    ],
)
def test_simulated(
    shape: tuple[int, int, int], taps: int, causal: bool, gates: tuple[str, ...], size: float
) -> None:
    arrays = drawn(shape, taps, causal=causal, gates=gates, size=size)
    assert_near_rounding(simulated, arrays, causal)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "length", [1, 13, 1000, 1024, 2048, 4095, 8192, 10_000, 12_289, 16_384, 17_000, LONGEST]
)
@pytest.mark.parametrize(("causal", "size"), [(True, 1.0), (True, 1e-4), (False, 1e4)])
@pytest.mark.parametrize("batch", [4, 7])
def test_errors_on_a_gpu(length: int, causal: bool, size: float, batch: int) -> None:
    gates = ("pre_gate", "post_gate")
    arrays = drawn((batch, 96, length), length, causal=causal, gates=gates, size=size)
    assert_near_rounding(named, arrays, causal)


def case(
    name: str,
    length: int,
    taps: int,
    run: Any,
    *,
    batch: int = 2,
    causal: bool = True,
    gates: tuple[str, ...] = ("pre_gate", "post_gate"),
) -> OpCase:
    return OpCase(
        name=name,
        run=lambda arrays: run(**arrays, causal=causal),
        reference=lambda arrays: long_conv(**arrays, causal=causal, implementation="reference"),
        arrays=drawn((batch, 2, length), taps, causal=causal, gates=gates),
        shared=frozenset({"filter", "bias"}),
        terms=length,
        grad_terms=2 * length,
    )


def cases(run: Any) -> list[OpCase]:
    return [
        case("four rows in a tile", 1000, 300, run, batch=8),
        case("two rows in a tile, both ways", 1500, 2000, run, causal=False, gates=("post_gate",)),
        case("a short row in a tile", 130, 130, run, batch=3, gates=()),
        case("a tile a row", 4096, 4096, run, gates=("pre_gate",)),
        case("two classes", 8191, 4000, run, batch=3),
        case("two warpgroups a row", 16_500, 3000, run),
    ]


@pytest.mark.slow(weeks=5, group="simulated long_conv")
@pytest.mark.parametrize("case", cases(simulated)[:3], ids=str)
def test_simulated_values_and_gradients(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", cases(named), ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize(
    ("length", "batch", "ring", "points"),
    [
        (1000, 8, Ring(1, 4), 1024),
        (1000, 6, Ring(1, 2), 2048),
        (1000, 3, Ring(1, 1), 4096),
        (1025, 4, Ring(1, 2), 2048),
        (4096, 4, Ring(1, 1), 4096),
        (4097, 4, Ring(2, 1), 8192),
        (16_384, 4, Ring(4, 1), 16_384),
        (16_385, 4, Ring(6, 1), 24_576),
        (LONGEST, 4, Ring(8, 1), LONGEST),
    ],
)
def test_rings(length: int, batch: int, ring: Ring, points: int) -> None:
    assert Ring.of(length, batch) == ring
    assert ring.points == points >= length


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, "this is NVIDIA B200"),
        ({"device": Device("cpu")}, "this is cpu"),
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"length": LONGEST + 1}, "it takes rows of at most 32768 steps, not 32769"),
        ({"segment_ids": jax.ShapeDtypeStruct((1, 64), jnp.int32)}, "it does not know packed rows"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": 64, "dtype": bf16} | change
    device, length, dtype = (call.pop(name) for name in ("device", "length", "dtype"))
    x, filter = jax.ShapeDtypeStruct((1, 3, length), dtype), jax.ShapeDtypeStruct((3, 8), jnp.float32)
    assert reason in (why_not(device, x, filter, **call) or "it can run")


@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if shape.length <= LONGEST and shape.documents == 1],
    ids=lambda shape: shape.name,
)
def test_takes_the_shapes_of_real_models_by_name_alone(shape: Any) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), bf16)
    filter = jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)
    assert why_not(HOPPER, x, filter, pre_gate=x, post_gate=x) is None
    assert "mosaic_gpu: it has not been timed on an H200" in explain(x, filter, device=HOPPER)


def test_cannot_be_asked_for_on_a_cpu() -> None:
    x = jnp.ones((1, 3, 64), bf16)
    with pytest.raises(ValueError, match="this is cpu"):
        named(x, jnp.ones((3, 4)))
