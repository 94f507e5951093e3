"""The Hopper kernels' values: simulated on the CPU with races watched, on a GPU what one runs, and what it refuses.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.neural_memory import bench, mosaic_gpu, neural_memory, two_layers
from pallas_kernels.neural_memory.hopper import why_not
from pallas_kernels.neural_memory.mosaic_gpu import neural_memory_mosaic_gpu
from pallas_kernels.neural_memory.reference import neural_memory_reference
from pallas_kernels.neural_memory.shapes import SHAPES, NeuralMemoryShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import normal, packed
from tests.pallas_kernels.op_suite import OpCase
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
NAMES = ("q", "k", "v", "theta", "eta", "alpha", "m1", "m2")
# In simulation chunks may be smaller than a tile; `why_not` refuses them.
SMALL = NeuralMemoryShape("h1_d128", 1, 45, 1, 128, 256, 20)
LARGE = ((1000, 256, 1024), (304, 128, 384), (2048, 256, 512))
"""Tokens of a chunk, size of a head, hidden units."""
SHAPES_ON_A_GPU = (
    NeuralMemoryShape("h2_d256_t1000_c256", 2, 1000, 2, 256, 1024, 256),
    NeuralMemoryShape("h3_d128_t777_c304", 2, 777, 3, 128, 384, 304),
    NeuralMemoryShape("h1_d256_t600_c4096", 2, 600, 1, 256, 512, 4096),
    NeuralMemoryShape("h1_d256_t2560_c256", 2, 2560, 1, 256, 1024, 256),
)


def case(run: Any, shape: NeuralMemoryShape, ids: Any = None) -> OpCase:
    given = dict(zip(NAMES, bench.arrays(shape), strict=True))
    given["v"] = (given["v"] * shape.width**-0.5).astype(jnp.bfloat16)
    given |= {} if ids is None else {"segment_ids": ids}

    def call(op: Any, arrays: Any) -> Any:
        options = {"chunk_size": shape.chunk, "segment_ids": arrays.get("segment_ids")}
        return op(*(arrays[n] for n in NAMES[:6]), (arrays["m1"], arrays["m2"]), **options)

    return OpCase(
        name=shape.name,
        run=partial(call, run),
        reference=partial(call, neural_memory_reference),
        arrays=given,
        terms=shape.length * shape.hidden,
    )


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated(simulation: Any) -> None:
    """Values; three chunks, of which the last is cut short."""
    _check_values(case(partial(neural_memory_mosaic_gpu, interpret=simulation), SMALL))


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated_where_documents_start_anywhere(simulation: Any) -> None:
    run = partial(neural_memory_mosaic_gpu, interpret=simulation)
    _check_values(case(run, SMALL, packed(SMALL.length)[:1]))


def _check_values(case: OpCase) -> None:
    found, wide = jax.jit(case.run)(case.arrays), op_suite._in_fp32(case.arrays)
    for got, want in zip(*map(jax.tree.leaves, (found, jax.jit(case.reference)(wide))), strict=True):
        assert_close(got, want, jnp.bfloat16, case.terms)


def _check_vmapped(case: OpCase) -> None:
    stacked = {n: jnp.stack([x, x / 2]) for n, x in case.arrays.items()}
    _check_values(replace(case, run=jax.vmap(case.run), reference=jax.vmap(case.reference), arrays=stacked))


CHECKS = {"values": _check_values, "vmap": _check_vmapped}


def _reads(run: Any, length: int, width: int, hidden: int) -> OpCase:
    """Two rows, each with a memory of its own."""
    shapes = {"q": (length, width), "m1": (width, hidden), "m2": (hidden, width)}
    sizes = {"q": 1.0, "m1": width**-0.5, "m2": hidden**-0.5}
    drawn = {n: sizes[n] * normal(i, (2, 1, *shape)) for i, (n, shape) in enumerate(shapes.items())}
    return OpCase(
        name=f"t{length}_d{width}_e{hidden}",
        run=lambda x: run((x["m1"], x["m2"]), x["q"], jnp.bfloat16),
        reference=lambda x: x["q"] + jax.nn.silu(x["q"] @ x["m1"]) @ x["m2"],
        arrays={n: x.astype(jnp.bfloat16) for n, x in drawn.items()},
        terms=width + hidden,
    )


@pytest.mark.slow(days=28, group="simulated kernels")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("length", "width", "hidden"), [(64, 128, 256), (300, 256, 128)])
def test_simulated_reads(length: int, width: int, hidden: int, check: str, simulation: Any) -> None:
    """One tile and heads of 128, several tiles and heads of 256."""
    CHECKS[check](_reads(partial(mosaic_gpu.read, simulation), length, width, hidden))


def _writes(run: Any, length: int, width: int, hidden: int) -> OpCase:
    """The same of the gradients of a write, and of its losses."""
    reads, shape = _reads(None, length, width, hidden), (2, 1, length)
    k, v = (normal(i, (*shape, width)) for i in (3, 4))
    k, v = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (k, v))
    theta = jnp.asarray(np.random.default_rng(5).uniform(0, 1, shape), jnp.float32)
    weights = {n: reads.arrays[n] for n in ("m1", "m2")}

    def call(run: Any, x: Any) -> Any:
        return run((x["m1"], x["m2"]), x["k"], x["v"], x["theta"], x["k"].dtype)

    return OpCase(
        name=reads.name,
        run=partial(call, run),
        reference=partial(call, two_layers.gradients),
        arrays={"k": k.astype(jnp.bfloat16), "v": v.astype(jnp.bfloat16), "theta": theta, **weights},
        terms=length * hidden,
    )


@pytest.mark.slow(days=28, group="simulated kernels", every="64-128-256-values")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("length", "width", "hidden"), [(64, 128, 256), (150, 256, 128)])
def test_simulated_writes(length: int, width: int, hidden: int, check: str, simulation: Any) -> None:
    """Against XLA's in fp32, which has a test against `jax.grad`."""
    CHECKS[check](_writes(partial(mosaic_gpu.gradients, simulation), length, width, hidden))


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", LARGE, ids=lambda size: "_".join(map(str, size)))
def test_reads_on_a_gpu(size: tuple[int, int, int], check: str) -> None:
    CHECKS[check](_reads(partial(mosaic_gpu.read, None), *size))


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", LARGE, ids=lambda size: "_".join(map(str, size)))
def test_writes_on_a_gpu(size: tuple[int, int, int], check: str) -> None:
    CHECKS[check](_writes(partial(mosaic_gpu.gradients, None), *size))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES_ON_A_GPU, ids=lambda shape: shape.name)
def test_on_a_gpu(shape: NeuralMemoryShape) -> None:
    """Values and gradients: no further from XLA in fp32 than twice what XLA in bf16 is."""
    errors = check(bench.plan(shape), jax.random.key(0))
    assert set(errors) == {"xla", "mosaic_gpu_or_xla"}


@pytest.mark.gpu
def test_documents_on_a_gpu() -> None:
    shape = SHAPES_ON_A_GPU[0]
    run = partial(neural_memory, implementation="mosaic_gpu_or_xla")
    _check_values(case(run, shape, packed(shape.length)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (8, 0), "NVIDIA A100")}, "9.0 exactly (H100, H200), this is NVIDIA A100"),
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"hidden": 0}, "memories of two matrices alone"),
        ({"width": 64}, "its heads are of size 128 or 256, not 64"),
        ({"hidden": 320}, "it takes 128 hidden units at a time, 320 is no multiple"),
        ({"chunk": 64}, "it reads 256 tokens of a chunk at a time, these have 64"),
        ({"length": 200}, "these have 200"),
        ({"chunk": 300}, "its chunks are multiples of 8 tokens, these have 300"),
        ({"length": 1 << 22}, "it counts elements in 32 bits"),
        ({"length": (1 << 19) + 1, "chunk": 1 << 19}, "there are 2 chunks of 524288 tokens and 1024 units"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {
        "device": HOPPER,
        "dtype": jnp.bfloat16,
        "length": 1024,
        "width": 256,
        "hidden": 1024,
        "chunk": 512,
    }
    assert _why_not(**call) is None
    assert reason in (_why_not(**call | change) or "it can run")


def _why_not(device: Device, dtype: Any, length: int, width: int, hidden: int, chunk: int) -> str | None:
    x, gate = (jax.ShapeDtypeStruct((2, length, 4, width)[:n], dtype) for n in (4, 3))
    sizes = [(width, hidden), (hidden, width)] if hidden else [(width, width)]
    weights = tuple(jax.ShapeDtypeStruct((4, *size), jnp.float32) for size in sizes)
    return why_not(device, x, x, x, gate, gate, gate, weights, chunk_size=chunk)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: NeuralMemoryShape) -> None:
    given = jax.eval_shape(partial(bench.arrays, shape))
    reason = why_not(HOPPER, *given[:6], given[6:], chunk_size=shape.chunk)
    assert (reason is None) == (shape.hidden > 0 and shape.chunk >= 256)
    # Without a chunk of its own a call has the op's.
    assert (why_not(HOPPER, *given[:6], given[6:]) is None) == (shape.hidden > 0)
