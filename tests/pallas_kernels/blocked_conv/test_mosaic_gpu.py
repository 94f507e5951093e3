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
from pallas_kernels.blocked_conv import bench, blocked_conv, explain
from pallas_kernels.blocked_conv.hopper import LONGEST, TILE, why_not
from pallas_kernels.blocked_conv.mosaic_gpu import blocked_conv_mosaic_gpu
from pallas_kernels.blocked_conv.shapes import SHAPES, BlockedConvShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    assert_documents_keep_to_themselves,
    conv_case,
    documents,
    normal,
)

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
ALL_STREAMS = ("x", "pre_gate", "post_gate")


def case(
    name: str,
    length: int,
    taps: int,
    run: Any,
    *,
    batch: int = 1,
    streams: tuple[str, ...] = ALL_STREAMS,
    ids: Any = None,
) -> OpCase:
    channels = 2
    arrays = {s: normal(i, (batch, channels, length), jnp.bfloat16) for i, s in enumerate(streams)}
    arrays |= {"filter": normal(4, (channels, taps)), "bias": normal(5, (channels,))}
    if ids is not None:
        arrays |= {"segment_ids": ids}
    return conv_case(
        name,
        lambda arrays: run(**arrays),
        lambda arrays: blocked_conv(**arrays, implementation="reference"),
        arrays,
        terms=taps,
    )


def cases(run: Any) -> list[OpCase]:
    return [
        case("one tile", TILE, 128, run),
        case("two rows, two tiles, the last not full", TILE + 512, LONGEST, run, batch=2),
        case("odd length, one tap", TILE + 77, 1, run, streams=("x",)),
        case("no post-gate, the last tile one chunk", TILE + 40, 100, run, streams=("x", "pre_gate")),
        case("no pre-gate, two chunks", 2 * TILE, 66, run, streams=("x", "post_gate")),
    ]


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("case", cases(partial(blocked_conv_mosaic_gpu, interpret=True)), ids=str)
def test_simulated(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("check", ["reference", "poison"])
@pytest.mark.parametrize(
    ("length", "taps", "streams"),
    [(TILE + 77, LONGEST, ALL_STREAMS), (2 * TILE, 66, ("x",)), (1500, 100, ("x", "post_gate"))],
    ids=str,
)
@pytest.mark.usefixtures("one_watched_program")
def test_simulated_packed(length: int, taps: int, streams: tuple[str, ...], check: str) -> None:
    """Values and gradients."""
    run = partial(blocked_conv_mosaic_gpu, interpret=True)
    op_suite.CHECKS[check](case("", length, taps, run, batch=2, streams=streams, ids=documents(length)))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_documents_keep_to_themselves() -> None:
    run = partial(blocked_conv_mosaic_gpu, interpret=True)
    arrays = case("", 1000, LONGEST, run, batch=2, ids=documents(1000)).arrays
    assert_documents_keep_to_themselves(run, dict(arrays))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_under_vmap() -> None:
    run = partial(blocked_conv_mosaic_gpu, interpret=True)
    op_suite.check_vmap(case("two rows", TILE, 70, run, batch=2))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_a_stream_of_rows_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few programs wanted, rows follow one another in one; nothing passes from a row to the next."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    run = partial(blocked_conv_mosaic_gpu, interpret=True)
    op_suite.check_reference(case("three rows of full tiles", TILE, 100, run, batch=3))


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize(("length", "taps"), [(TILE, 1), (2 * TILE, LONGEST), (3 * TILE + 77, 100)])
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_packed_on_a_gpu(length: int, taps: int, streams: tuple[str, ...], check: str) -> None:
    run, ids = partial(blocked_conv, implementation="mosaic_gpu"), documents(length)
    op_suite.CHECKS[check](case("", length, taps, run, batch=2, streams=streams, ids=ids))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [TILE, 8192])
def test_documents_keep_to_themselves_on_a_gpu(length: int) -> None:
    run = partial(blocked_conv, implementation="mosaic_gpu")
    arrays = case("", length, LONGEST, run, batch=2, ids=documents(length)).arrays
    assert_documents_keep_to_themselves(run, dict(arrays))


@pytest.mark.gpu
def test_packed_rows_in_one_program_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows follow one another in a program, with every gradient; the same bits twice."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    ids = jnp.tile(documents(8192), (3, 1))
    many = case("", 8192, 128, blocked_conv_mosaic_gpu, batch=6, ids=ids)
    op_suite.check_reference(many)
    first, second = (op_suite.value_and_grads(many.run, many.arrays) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", cases(partial(blocked_conv, implementation="mosaic_gpu")), ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"taps": 130}, "at most 129 taps, not 130"),
        ({"length": 4095}, "shorter than one tile of 4096 steps"),
        ({"causal": False}, "does not look ahead"),
        ({"segment_ids": jax.ShapeDtypeStruct((1, TILE), jnp.int32)}, "it can run"),
        (
            {"pre_gate": jax.ShapeDtypeStruct((1, 3, TILE), jnp.float32)},
            "bf16 streams, these are bfloat16, float32",
        ),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": TILE, "dtype": jnp.bfloat16, "taps": 8} | change
    device, length, dtype, taps = (call.pop(name) for name in ("device", "length", "dtype", "taps"))
    x, filter = jax.ShapeDtypeStruct((1, 3, length), dtype), jax.ShapeDtypeStruct((3, taps), jnp.float32)
    assert reason in (why_not(device, x, filter, **call) or "it can run")


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.causal], ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: Any) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    filter = jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)
    assert why_not(HOPPER, x, filter, pre_gate=x, post_gate=x) is None


def test_takes_packed_rows() -> None:
    x, filter = jax.ShapeDtypeStruct((1, 3, TILE), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, TILE), jnp.int32)
    assert explain(x, filter, device=HOPPER, segment_ids=ids).startswith("blocked_conv: mosaic_gpu")


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
@pytest.mark.parametrize("documents", [1, 60])
def test_the_benchmark_passes_its_gate(documents: int) -> None:
    shape = BlockedConvShape("tiny", 1, 2, TILE, 100, documents=documents)
    errors = check(bench.plan(shape, interpret=True), jax.random.key(0))
    assert set(errors) == {"xla", "mosaic_gpu"}
