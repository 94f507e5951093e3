"""The Hopper kernel: simulated on the CPU with races watched, on a GPU the suite, and what it is not asked to do.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels._dispatch import Device
from pallas_kernels.long_conv import explain, long_conv
from pallas_kernels.long_conv.hopper import LONGEST_ON_CHIP, Ring, why_not
from pallas_kernels.long_conv.mosaic_gpu import long_conv_mosaic_gpu
from pallas_kernels.long_conv.shapes import SHAPES
from pallas_kernels.runtime import compiling_for
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import HOPPER as GPU
from tests.pallas_kernels.linear_state import equations
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import normal

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
bf16 = jnp.bfloat16
simulated = partial(long_conv_mosaic_gpu, interpret=True)
named = partial(long_conv, implementation="mosaic_gpu_vjp")
halves = partial(long_conv, implementation="mosaic_gpu_half")

ALL_STREAMS = ("x", "pre_gate", "post_gate")


def drawn(
    shape: tuple[int, int, int], taps: int, *, causal: bool, gates: tuple[str, ...], size: float = 1.0
) -> dict[str, Any]:
    """x and some gates of a given size, taps of unit energy, a bias."""
    arrays = {
        n: jax.device_put((np.asarray(normal(i, shape)) * size).astype(bf16))
        for i, n in enumerate(ALL_STREAMS)
        if n in ("x", *gates)
    }
    width = taps if causal else 2 * taps - 1
    filter = jax.device_put(np.asarray(normal(4, (shape[1], width))) * np.float32(width**-0.5))
    return arrays | {"filter": filter, "bias": normal(3, (shape[1],))}


def outputs(run: Any, arrays: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Values and gradients under the cotangent `dy`."""
    inputs = {name: z for name, z in arrays.items() if name != "dy"}
    y, vjp = jax.vjp(lambda inputs: run(**inputs, causal=causal), inputs)
    return {"y": y} | vjp(arrays["dy"].astype(y.dtype))[0]


def assert_near_rounding(run: Any, arrays: dict[str, Any], causal: bool) -> None:
    """Values and gradients: at most 1.5 times the error of an fp32 FFT rounded to bf16; the same bits twice.

    Both in norm against f64.
    """
    arrays = arrays | {"dy": normal(5, arrays["x"].shape, bf16)}
    compiled = jax.jit(lambda arrays: outputs(run, arrays, causal))
    ours, again = compiled(arrays), compiled(arrays)
    assert all(np.array_equal(ours[name], again[name]) for name in ours), "the same bits twice"

    @jax.jit
    def in_xla(arrays: dict[str, Any]) -> Any:
        return outputs(partial(long_conv, implementation="xla"), arrays, causal)

    def transformed(dtype: Any) -> Any:
        wide = {name: np.asarray(z).astype(dtype) for name, z in arrays.items()}
        return {name: np.asarray(z) for name, z in in_xla(wide).items()}

    rounded = {name: z.astype(bf16) for name, z in transformed(np.float32).items()}
    with jax.enable_x64(True):
        truth = transformed(np.float64)
    for name, exact in truth.items():
        ours_off, rounded_off = (
            np.linalg.norm(np.asarray(z[name], np.float64) - exact) / np.linalg.norm(exact)
            for z in (ours, rounded)
        )
        assert ours_off <= 1.5 * rounded_off, (
            f"{name}: {ours_off} where rounding an fp32 FFT gives {rounded_off}"
        )


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("shape", "taps", "causal", "gates", "size"),
    [
        pytest.param((4, 1, 1000), 300, True, ("pre_gate", "post_gate"), 1e-4, id="four rows in a tile"),
        pytest.param((2, 1, 1500), 2000, False, ("post_gate",), 1.0, id="two rows in a tile, both ways"),
        pytest.param((3, 2, 130), 130, True, ("pre_gate",), 1e4, id="a short row in a tile"),
        pytest.param((4, 1, 4095), 4095, True, (), 1.0, id="a tile a row"),
        pytest.param((3, 1, 8192), 8192, True, ("pre_gate", "post_gate"), 1e4, id="two classes"),
        pytest.param((1, 2, 12_289), 9000, False, ("pre_gate", "post_gate"), 1e-4, id="four classes"),
        pytest.param((2, 1, 17_000), 9000, False, ("post_gate",), 1.0, id="five tiles of six"),
        pytest.param(
            (2, 1, LONGEST_ON_CHIP), LONGEST_ON_CHIP, True, ("pre_gate", "post_gate"), 1e-4, id="eight tiles"
        ),
    ],
)
def test_simulated(
    shape: tuple[int, int, int], taps: int, causal: bool, gates: tuple[str, ...], size: float
) -> None:
    arrays = drawn(shape, taps, causal=causal, gates=gates, size=size)
    assert_near_rounding(simulated, arrays, causal)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("shape", "taps", "causal", "size"),
    [
        pytest.param((4, 1, 1000), 300, True, 1e-4, id="four rows in a tile"),
        pytest.param((2, 1, 8192), 8192, True, 1e4, id="two classes"),
        pytest.param((2, 1, 12_289), 9000, False, 1e-4, id="four classes by two warpgroups"),
        pytest.param((1, 1, LONGEST_ON_CHIP), LONGEST_ON_CHIP, True, 1.0, id="eight tiles"),
    ],
)
def test_simulated_in_halves(shape: tuple[int, int, int], taps: int, causal: bool, size: float) -> None:
    arrays = drawn(shape, taps, causal=causal, gates=("pre_gate", "post_gate"), size=size)
    assert_near_rounding(partial(simulated, dtype=jnp.float16), arrays, causal)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("shape", "gates"),
    [
        pytest.param((16, 1, 300), ("pre_gate", "post_gate"), id="two tiles of eight rows"),
        pytest.param((16, 1, 600), ("pre_gate", "post_gate"), id="four tiles of four rows"),
        pytest.param((3, 1, 2100), ("post_gate",), id="three tiles"),
        pytest.param((2, 1, 4100), ("pre_gate", "post_gate"), id="two rows of two tiles"),
        pytest.param((2, 1, 8200), ("pre_gate",), id="two rows of three tiles"),
    ],
)
def test_simulated_rows_of_one_program(
    shape: tuple[int, int, int], gates: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few programs wanted, rows follow one another, and their gradients of the taps are summed."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    assert_near_rounding(simulated, drawn(shape, 300, causal=True, gates=gates), True)


LENGTHS = (1, 13, 1000, 1024, 2048, 4095, 8192, 10_000, 12_289, 16_384, 17_000, LONGEST_ON_CHIP)
FORMS = ((True, 1.0, 1.0), (True, 1e-4, 0.3), (False, 1e4, 2.0))
"""Direction, size of the streams, taps a step."""


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("causal", "size", "share"), FORMS)
@pytest.mark.parametrize("batch", [4, 7])
@pytest.mark.parametrize("run", [named, halves], ids=["vjp", "half"])
def test_errors_on_a_gpu(length: int, causal: bool, size: float, share: float, batch: int, run: Any) -> None:
    taps = max(1, int(share * length))
    arrays = drawn((batch, 96, length), taps, causal=causal, gates=("pre_gate", "post_gate"), size=size)
    assert_near_rounding(run, arrays, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS[2:])
@pytest.mark.parametrize("gates", [(), ("pre_gate",), ("post_gate",), ("pre_gate", "post_gate")])
def test_rows_of_one_program_on_a_gpu(
    length: int, gates: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows follow one another, an odd number of tiles where several share one."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    arrays = drawn((12 if length <= 1024 else 14, 5, length), length, causal=True, gates=gates)
    assert_near_rounding(named, arrays, True)


def case(
    name: str,
    length: int,
    taps: int,
    run: Any,
    *,
    batch: int = 2,
    channels: int = 2,
    causal: bool = True,
    gates: tuple[str, ...] = ("pre_gate", "post_gate"),
) -> OpCase:
    return OpCase(
        name=name,
        run=lambda arrays: run(**arrays, causal=causal),
        reference=lambda arrays: long_conv(**arrays, causal=causal, implementation="reference"),
        arrays=drawn((batch, channels, length), taps, causal=causal, gates=gates),
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


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}-{case}")
        for name, run in (("vjp", named), ("half", halves))
        for case in cases(run)
    ],
)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


BY_XLA = pytest.param(
    partial(long_conv, implementation="xla"),
    id="xla",
    marks=pytest.mark.slow(days=28, group="properties of kernels"),
)
"""On virtual devices of a CPU."""

IN_SHARD_MAP = [BY_XLA, pytest.param(named, id="vjp", marks=pytest.mark.gpu(count=2))]


@pytest.mark.parametrize("run", IN_SHARD_MAP)
def test_inside_shard_map(run: Any) -> None:
    op_suite.check_shard_map(cases(run)[0])


@pytest.mark.parametrize(
    ("length", "batch", "ring", "points"),
    [
        (512, 16, Ring(1, 8), 512),
        (1000, 8, Ring(1, 4), 1024),
        (1000, 6, Ring(1, 2), 2048),
        (1000, 3, Ring(1, 1), 4096),
        (1025, 4, Ring(1, 2), 2048),
        (4096, 4, Ring(1, 1), 4096),
        (4097, 4, Ring(2, 1), 8192),
        (16_384, 4, Ring(4, 1), 16_384),
        (16_385, 4, Ring(6, 1), 24_576),
        (LONGEST_ON_CHIP, 4, Ring(8, 1), LONGEST_ON_CHIP),
    ],
)
def test_rings(length: int, batch: int, ring: Ring, points: int) -> None:
    assert Ring.of(length, batch) == ring
    assert ring.points == points >= length


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"length": (1 << 24) + 1}, "it takes rows of at most 16777216 steps, not 16777217"),
        (
            {"length": 1 << 24, "batch": 64},
            "64 rows of 16777216 points a channel have spectra of 2^31 numbers",
        ),
        ({"length": 1 << 24, "batch": 63}, "it can run"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": 64, "dtype": bf16, "batch": 1} | change
    device, length, dtype, batch = (call.pop(name) for name in ("device", "length", "dtype", "batch"))
    x, filter = jax.ShapeDtypeStruct((batch, 3, length), dtype), jax.ShapeDtypeStruct((3, 8), jnp.float32)
    assert reason in (why_not(device, x, filter, **call) or "it can run")


@pytest.mark.parametrize(
    "shape",
    [shape for shape in SHAPES if shape.documents == 1],
    ids=lambda shape: shape.name,
)
def test_takes_the_shapes_of_real_models(shape: Any) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), bf16)
    filter = jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)
    assert why_not(HOPPER, x, filter, pre_gate=x, post_gate=x) is None
    first = "xla_or_monarch" if shape.name in ("few_d32_8k", "few_d32_32k") else "mosaic_gpu_half"
    assert explain(x, filter, device=HOPPER).startswith(f"long_conv: {first} on ")


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("length", [4096, 12_289, 40_000])
@pytest.mark.parametrize("name", ["mosaic_gpu_vjp", "mosaic_gpu_half"])
def test_backward_keeps_inputs_alone(name: Any, length: int) -> None:
    """Two thirds of what XLA's form keeps of as many rows and taps: no product with a gate and no spectrum."""
    x, filter = jax.ShapeDtypeStruct((2, 3, length), bf16), jax.ShapeDtypeStruct((3, length), jnp.float32)

    def kept(name: Any) -> int:
        def run(x: Any, filter: Any, bias: Any, gates: Any) -> Any:
            return long_conv(x, filter, bias=bias, **gates, implementation=name)

        arrays = (x, filter, jax.ShapeDtypeStruct((3,), jnp.float32), {"pre_gate": x, "post_gate": x})
        with compiling_for(GPU):
            backward = jax.eval_shape(lambda *arrays: jax.vjp(run, *arrays)[1], *arrays)
        return sum(z.size * z.dtype.itemsize for z in jax.tree.leaves(backward))

    inputs = sum(z.size * z.dtype.itemsize for z in (x, x, x, filter))
    assert inputs <= kept(name) <= inputs + 64  # the bias, and a few scalars
    assert kept(name) <= kept("xla") * 2 / 3 + 64


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_mosaic_gpu")
@pytest.mark.parametrize(
    ("name", "length", "count"),
    [
        ("mosaic_gpu_vjp", 8192, 2),
        ("mosaic_gpu_half", 16_384, 4),
        (None, 8192, 2),
        (None, 8193, 4),
    ],
)
def test_gradients_take_their_kernels(name: Any, length: int, count: int) -> None:
    """One pass of the streams, above 8,192 steps two and a sum of what they keep."""
    x, filter = jax.ShapeDtypeStruct((1, 64, length), bf16), jax.ShapeDtypeStruct((64, 8), jnp.float32)

    def loss(x: Any, filter: Any) -> Any:
        return jnp.sum(long_conv(x, filter, implementation=name).astype(jnp.float32))

    with compiling_for(GPU):
        program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, filter)
    kernels = [e for e in equations(program.jaxpr) if e.primitive.name == "mpmd_map"]
    assert len(kernels) == count


def test_says_what_goes_elsewhere() -> None:
    x, filter = jax.ShapeDtypeStruct((1, 3, 1023), bf16), jax.ShapeDtypeStruct((3, 8), jnp.float32)
    assert "mosaic_gpu_vjp: it has not been timed below 1,024 steps" in explain(x, filter, device=HOPPER)


@pytest.mark.parametrize(
    ("rows", "length", "first"),
    [
        (32, 8192, "xla_or_monarch"),
        (32, 32_768, "xla_or_monarch"),
        (33, 8192, "mosaic_gpu_half"),
        (32, 4096, "mosaic_gpu_half"),
        (32, 40_000, "mosaic_gpu_half"),
    ],
)
def test_few_rows_on_chip_leave_it_idle(rows: int, length: int, first: str) -> None:
    x = jax.ShapeDtypeStruct((1, rows, length), bf16)
    filter = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    assert explain(x, filter, device=HOPPER).startswith(f"long_conv: {first} on ")
