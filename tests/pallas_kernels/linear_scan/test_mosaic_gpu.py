"""The Hopper kernel: simulated on the CPU, on a GPU what one device can run, and what it is not asked to do.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both. The simulation compiles for seconds a
kernel, and does not know which copies a GPU makes as plain memory.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.linear_scan import explain, linear_scan
from pallas_kernels.linear_scan.hopper import STEPS, lay_out, why_not
from pallas_kernels.linear_scan.mosaic_gpu import linear_scan_mosaic_gpu
from pallas_kernels.linear_scan.shapes import SHAPES, LinearScanShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import normal

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")


def case(
    name: str,
    shape: tuple[int, ...],
    run: Any,
    *,
    dtype: Any = jnp.float32,
    shared: bool = False,
    initial: bool = True,
    slowest: float = 4.0,
    reference: str = "reference",
    **options: Any,
) -> OpCase:
    """Factors of 1 to `slowest` steps' memory, some of them zero as where a document begins."""
    rows = (1, *shape[1:]) if shared else shape
    kept, rates = np.asarray(normal(1, rows)) < 2.0, np.exp(normal(0, rows))
    a = np.where(kept, np.exp(-rates / slowest), 0.0)
    arrays = {"a": jax.device_put(a.astype(dtype)), "b": normal(2, shape, dtype)}
    if initial:
        arrays |= {"initial": normal(3, (*shape[:-2], shape[-1]))}
    length, reverse = shape[-2], bool(options.get("reverse"))
    return OpCase(
        name=name,
        run=lambda x: run(**x, **options),
        reference=lambda x: linear_scan(**x, reverse=reverse, implementation=reference),  # pyright: ignore
        arrays=arrays,
        shared=frozenset({"a"} if shared else ()),
        terms=length,
        grad_terms=2 * length * (shape[0] if shared else 1),
    )


SIMULATED = partial(linear_scan_mosaic_gpu, interpret=True)
CASES = [
    case("two tiles, blocks not full", (2, 21, 132), SIMULATED),
    case("narrow rows of bf16, against time", (9, 37, 16), SIMULATED, dtype=jnp.bfloat16, reverse=True),
    case("pieces, shared factors", (2, 2, 40, 64), SIMULATED, shared=True, pieces=2),
    case("one step", (3, 1, 4), SIMULATED),
    case("pieces, against time, no state", (2, 52, 8), SIMULATED, initial=False, reverse=True, pieces=3),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="two tiles*")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_simulated(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/linear_scan/test_mosaic_gpu")
def test_simulated_under_vmap() -> None:
    op_suite.check_vmap(case("two rows", (2, 5, 8), SIMULATED))


CHOSEN, WHOLE = partial(linear_scan, implementation="mosaic_gpu"), partial(linear_scan_mosaic_gpu, pieces=1)
GPU_CASES: dict[str, Any] = {
    "1": partial(case, shape=(3, 1, 132), run=CHOSEN),
    "7, against time": partial(case, shape=(3, 7, 4), run=CHOSEN, reverse=True),
    "4097, pieces": partial(case, shape=(2, 4097, 320), run=CHOSEN, slowest=2000.0),
    "4097, bf16, pieces, against time": partial(
        case, shape=(2, 4097, 256), run=CHOSEN, dtype=jnp.bfloat16, reverse=True
    ),
    "4097, whole": partial(case, shape=(3, 4097, 128), run=WHOLE, slowest=2000.0),
    "4097, bf16, whole, against time": partial(
        case, shape=(3, 4097, 128), run=WHOLE, dtype=jnp.bfloat16, reverse=True
    ),
    "4097, many columns": partial(case, shape=(8, 4097, 1024), run=CHOSEN, slowest=100.0),
    "narrow, shared factors": partial(case, shape=(4, 96, 333, 16), run=CHOSEN, shared=True),
    "narrow, rows that fill no program": partial(case, shape=(9, 333, 16), run=CHOSEN, reverse=True),
    "65536, strong decay": partial(case, shape=(1, 65536, 128), run=CHOSEN, slowest=0.02, reference="xla"),
    "65536, bf16": partial(
        case, shape=(2, 65536, 64), run=CHOSEN, dtype=jnp.bfloat16, slowest=1e4, reference="xla"
    ),
    "1048576": partial(case, shape=(1, 1 << 20, 256), run=CHOSEN, slowest=1e5, reference="xla"),
}
"""Made where they run: the longest has 2 GB of streams. Long ones are compared with XLA's scan, as steps one by one
take minutes."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu(name: str) -> None:
    op_suite.check_reference(GPU_CASES[name](name))


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["vmap", "remat"])
def test_transformed_on_a_gpu(check: str) -> None:
    op_suite.CHECKS[check](case("4097", (2, 4097, 320), CHOSEN))


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_a_gpu() -> None:
    x = case("4097", (2, 4097, 320), CHOSEN)
    first, again = (op_suite.value_and_grads(x.run, x.arrays) for _ in range(2))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert bool((one == other).all())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "it takes bf16 and fp32 streams, a is float16"),
        ({"width": 6}, "rows of a multiple of 16 bytes, 6 columns of a are none"),
        ({"width": 4, "dtype": jnp.bfloat16}, "rows of a multiple of 16 bytes, 4 columns of a are none"),
        ({"length": 1 << 29}, "it counts elements in 32 bits"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": 100, "width": 8, "dtype": jnp.float32} | change
    x = jax.ShapeDtypeStruct((1, call["length"], call["width"]), call["dtype"])
    assert reason in (why_not(call["device"], x, x, initial=None, reverse=False) or "it can run")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: LinearScanShape) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), shape.dtype)
    assert why_not(HOPPER, x, x) is None


def test_goes_first_where_it_was_timed() -> None:
    def found(length: int, width: int) -> str:
        x = jax.ShapeDtypeStruct((4, length, width), jnp.float32)
        return explain(x, x, device=HOPPER)

    assert found(8192, 2560) == "linear_scan: mosaic_gpu on NVIDIA H200"
    assert "not mosaic_gpu: a tile has 16 steps, b has 1" in found(1, 2560)
    assert "not mosaic_gpu: rows of 16 columns" in found(8192, 16)
    with pytest.raises(ValueError, match="this is cpu"):
        linear_scan(jnp.ones((1, 2, 8)), jnp.ones((1, 2, 8)), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("rows", "length", "width", "pieces"),
    [(4, 8192, 2560, 1), (1, 1 << 20, 256, 132), (1, 100, 256, 1), (6144, 512, 16, 1), (1, 65536, 2560, 14)],
)
def test_cuts_rows_only_where_columns_are_few(rows: int, length: int, width: int, pieces: int) -> None:
    grid = lay_out(rows, length, width)
    assert grid.pieces == pieces
    assert (grid.pieces - 1) * grid.tiles * STEPS < length <= grid.pieces * grid.tiles * STEPS
