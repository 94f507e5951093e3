"""Rows that the Hopper kernels read where they lie: what is traced, simulated on the CPU, and on a GPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.blocked_conv.hopper import LONGEST, TILE
from pallas_kernels.blocked_conv.mosaic_gpu import blocked_conv_mosaic_gpu
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.blocked_conv.test_mosaic_gpu import ALL_STREAMS, case
from tests.pallas_kernels.linear_state import equations
from tests.pallas_kernels.short_conv.streams import assert_row_keeps_to_itself, documents

simulated = partial(blocked_conv_mosaic_gpu, interpret=True)
on_a_gpu = partial(blocked_conv, implementation="mosaic_gpu")


def traced(length: int, *, packed: bool = False) -> Any:
    """Values and gradients of 64 rows."""
    x, taps = jax.ShapeDtypeStruct((8, 8, length), jnp.bfloat16), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    ids = documents(length)[:1].repeat(8, 0) if packed else None

    def loss(x: Any, filter: Any, pre_gate: Any, post_gate: Any) -> Any:
        y = blocked_conv_mosaic_gpu(x, filter, pre_gate=pre_gate, post_gate=post_gate, segment_ids=ids)
        return jnp.sum(y.astype(jnp.float32))

    return jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, taps, x, x)


def copies(program: Any, size: int) -> list[str]:
    """What makes a stream of another size. What pads by nothing is no copy."""
    return [
        e.primitive.name
        for e in equations(program.jaxpr)
        if e.primitive.name in ("pad", "slice", "concatenate")
        and max(z.aval.size for z in e.invars) != e.outvars[0].aval.size >= size
    ]


@pytest.mark.slow(days=28, group="properties of kernels", every="8191")
@pytest.mark.parametrize("length", [TILE + 1, TILE + 64, 2 * TILE - 1])
def test_streams_are_not_copied(length: int) -> None:
    assert copies(traced(length, packed=True), 64 * length)
    assert not copies(traced(length), 64 * length)


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("length", "batch", "streams"),
    [
        pytest.param(2 * TILE - 1, 2, ALL_STREAMS, id="a row ends a step before its tile"),
        pytest.param(TILE + 320, 2, ALL_STREAMS, id="chunks, but no boxes"),
        pytest.param(TILE + 1, 32, ("x", "post_gate"), id="rows that need a tile more than others"),
        pytest.param(TILE - 1, 3, ("x", "pre_gate"), id="no post-gate, less than a tile"),
        pytest.param(1000, 3, ("x",), id="no gates, a fourth of a tile"),
        pytest.param(513, 1, ALL_STREAMS, id="the last chunk of all is cut"),
    ],
)
def test_simulated(length: int, batch: int, streams: tuple[str, ...]) -> None:
    op_suite.check_reference(case("", length, LONGEST, simulated, batch=batch, streams=streams))


@pytest.mark.usefixtures("one_watched_program")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("length", [1000, TILE + 1])
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_simulated_rows_of_one_program(
    length: int, streams: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients.

    Names of one memory are not compared: the watch takes all stages for one place, which is written under one name
    while another place of it is read under another.
    """
    from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

    monkeypatch.setattr(GPURaceDetectionState, "_check_ref_union", lambda *_: None)
    op_suite.check_reference(case("", length, LONGEST, simulated, batch=3, streams=streams))


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("length", [1000, TILE + 1, 2 * TILE - 1])
def test_a_row_knows_nothing_of_its_neighbours_in_memory(length: int) -> None:
    arrays = case("", length, LONGEST, simulated, batch=2).arrays
    assert_row_keeps_to_itself(simulated, dict(arrays), (1, 0))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_under_vmap() -> None:
    op_suite.check_vmap(case("", 1000, 70, simulated, batch=2))


LENGTHS = [TILE + 1, TILE + 64, TILE + 511, 2 * TILE - 1, 3 * TILE + 1]


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("gates", [(), ("pre_gate",), ("post_gate",), ("pre_gate", "post_gate")], ids=str)
def test_any_length_on_a_gpu(length: int, gates: tuple[str, ...]) -> None:
    """Values and gradients; 64 rows begin at every step of a chunk."""
    op_suite.check_reference(case("", length, LONGEST, on_a_gpu, batch=32, streams=("x", *gates)))


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("length", [TILE + 77, 131_071])
def test_suite_on_a_gpu(length: int, check: str) -> None:
    op_suite.CHECKS[check](case("", length, 100, on_a_gpu, batch=2))


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_knows_nothing_of_its_neighbours_on_a_gpu(length: int) -> None:
    arrays = case("", length, LONGEST, on_a_gpu, batch=2).arrays
    assert_row_keeps_to_itself(on_a_gpu, dict(arrays), (1, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [TILE + 1, 2 * TILE - 1])
def test_rows_of_one_program_on_a_gpu(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    op_suite.check_reference(case("", length, LONGEST, on_a_gpu, batch=32))


@pytest.mark.gpu
def test_the_same_bits_twice_on_a_gpu() -> None:
    """Rows that share a chunk are written by different programs."""
    arrays = case("", 2 * TILE - 1, 128, on_a_gpu, batch=512).arrays
    backward = jax.jit(lambda arrays, dy: jax.vjp(lambda arrays: on_a_gpu(**arrays), arrays)[1](dy)[0])
    first, *others = (backward(dict(arrays), arrays["x"]) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
