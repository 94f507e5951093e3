"""The Hopper kernel: simulated on the CPU, on a GPU what one device can run, and what it is not asked to do.

Remat and several devices cannot be simulated; `make gpu-compile` compiles both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from jaxblt.testing.tolerances import bound
from pallas_kernels import _hopper
from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.modal_conv import bench, explain, modal_conv
from pallas_kernels.modal_conv.hopper import MODES, SHORTEST, TILE, rows_per_tile, why_not
from pallas_kernels.modal_conv.mosaic_gpu import modal_conv_mosaic_gpu
from pallas_kernels.modal_conv.mosaic_gpu_pass import convolve
from pallas_kernels.modal_conv.shapes import SHAPES, ModalConvShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.jla import MOST_ERROR
from tests.pallas_kernels.linear_state import relative_rms
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    assert_documents_keep_to_themselves,
    assert_row_keeps_to_itself,
    conv_case,
    documents,
    normal,
)
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
ALL_STREAMS = ("x", "pre_gate", "post_gate")
CHANNELS = 2


def slow_and_fast(modes: int, slowest: float) -> dict[str, Any]:
    """Modes that decay in 1 to `slowest` steps, each adding as much to the output."""
    poles = np.geomspace(1 / slowest, 1.0, CHANNELS * modes).reshape(modes, CHANNELS).T
    residues = np.asarray(normal(4, (CHANNELS, modes))) * np.sqrt(poles)
    return {
        n: jax.device_put(x.astype(np.float32)) for n, x in (("log_poles", -poles), ("residues", residues))
    }


def case(
    name: str,
    length: int,
    modes: int,
    run: Any,
    *,
    batch: int = 1,
    streams: tuple[str, ...] = ALL_STREAMS,
    state: bool = False,
    ids: Any = None,
) -> OpCase:
    arrays = {s: normal(i, (batch, CHANNELS, length), jnp.bfloat16) for i, s in enumerate(streams)}
    arrays |= slow_and_fast(modes, 2.0 * length) | {"bias": normal(5, (CHANNELS,))}
    if state:
        arrays |= {"initial_state": normal(6, (batch, CHANNELS, modes))}
    if ids is not None:
        arrays |= {"segment_ids": ids}
    state = state and ids is None  # The kernel does not know the state after packed rows.
    return conv_case(
        name,
        lambda arrays: run(**arrays, output_final_state=state),
        lambda arrays: modal_conv(**arrays, output_final_state=state, implementation="reference"),
        arrays,
        terms=length,
    )


def cases(run: Any) -> list[OpCase]:
    return [
        case("one tile", TILE, MODES, run),
        case("two rows, two tiles, the last not full", TILE + 512, MODES, run, batch=2),
        case("odd length, one mode", TILE + 77, 1, run, streams=("x",)),
        case("no pre-gate, three tiles, five modes", 3 * TILE, 5, run, streams=("x", "post_gate")),
        case("a state before and after, odd length", TILE + 77, 5, run, batch=2, state=True),
        case("a quarter of a tile, a state before and after", SHORTEST, 3, run, batch=2, state=True),
        case("half a tile alone, no gates", 2048, MODES, run, batch=3, streams=("x",)),
        case("less than half a tile, odd length, a state", 1500, 5, run, batch=3, state=True),
    ]


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("case", cases(partial(modal_conv_mosaic_gpu, interpret=True)), ids=str)
def test_simulated(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    "case",
    [
        case(
            "chunks, but no boxes",
            TILE + 320,
            MODES,
            partial(modal_conv_mosaic_gpu, interpret=True),
            batch=2,
        ),
        case(
            "a row ends a step before its tile",
            2 * TILE - 1,
            3,
            partial(modal_conv_mosaic_gpu, interpret=True),
        ),
        case(
            "rows that need a tile more than others",
            TILE + 1,
            2,
            partial(modal_conv_mosaic_gpu, interpret=True),
            batch=32,
            state=True,
        ),
    ],
    ids=str,
)
def test_simulated_at_any_length(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions", every="less than half a tile")
@pytest.mark.parametrize(
    ("length", "reverse"),
    [
        pytest.param(2 * TILE - 1, False, id="fills its tiles"),
        pytest.param(2 * TILE - 1, True, id="fills its tiles, against time"),
        pytest.param(1500, False, id="less than half a tile"),
        pytest.param(TILE + 1, True, id="a tile for one step, against time"),
    ],
)
def test_simulated_rows_masked_in_registers(
    length: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program takes all rows, watched for races; y and dx are those of rows that are padded to whole boxes.

    The pass of modes cannot be watched: its tiles are written under one name and read under another.
    """
    arrays = case("", length, 5, None, batch=2, state=not reverse).arrays
    modes = (arrays["log_poles"], arrays["residues"], arrays["bias"])
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)

    def run(padding: int) -> list[jax.Array]:
        padded = {name: jnp.pad(arrays[name], ((0, 0), (0, 0), (0, padding))) for name in ALL_STREAMS}
        posts = [padded["post_gate"], padded["x"]] if reverse else [padded["post_gate"]]
        given, state = (padded["x"], modes, padded["pre_gate"], posts), arrays.get("initial_state")
        return jax.jit(lambda given: convolve(*given, state=state, reverse=reverse, interpret=True))(given)

    wanted = run(-length % _hopper.BOX)
    watched = partial(mosaic_gpu.InterpretGPUParams, detect_races=True)
    monkeypatch.setattr(mosaic_gpu, "InterpretGPUParams", watched)
    for y, want in zip(run(0), wanted, strict=True):
        assert_close(y, np.asarray(want[..., :length], np.float32), jnp.bfloat16, length)


@pytest.mark.usefixtures("one_watched_program")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("check", ["reference", "poison"])
@pytest.mark.parametrize(
    ("length", "streams", "state"),
    [(TILE + 512, ALL_STREAMS, True), (2 * TILE, ("x",), False), (TILE + 77, ("x", "post_gate"), False)],
    ids=str,
)
def test_simulated_packed(length: int, streams: tuple[str, ...], state: bool, check: str) -> None:
    run = partial(modal_conv_mosaic_gpu, interpret=True)
    ids = documents(length)
    op_suite.CHECKS[check](case("", length, 3, run, batch=2, streams=streams, state=state, ids=ids))


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_simulated_documents_keep_to_themselves(streams: tuple[str, ...]) -> None:
    run = partial(modal_conv_mosaic_gpu, interpret=True)
    arrays = case("", 1000, 3, run, batch=2, streams=streams, ids=documents(1000)).arrays
    assert_documents_keep_to_themselves(run, dict(arrays))


def shared_cases(run: Any) -> list[OpCase]:
    """Rows that share a tile: as long as their share or shorter, and of other numbers than powers of two."""
    return [
        case("two rows in a tile", 2048, MODES, run, batch=2),
        case("four rows in a tile", 1024, 3, run, batch=4, streams=("x",)),
        case(
            "two rows in each of three tiles, 1,536 steps", 1536, 5, run, batch=6, streams=("x", "post_gate")
        ),
        case("two rows of 1,024 in a tile", 1024, MODES, run, batch=2, streams=("x", "pre_gate")),
    ]


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("case", shared_cases(partial(modal_conv_mosaic_gpu, interpret=True)), ids=str)
@pytest.mark.usefixtures("one_watched_program")
def test_simulated_shared_tiles(case: OpCase) -> None:
    op_suite.check_reference(case)


@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("length", [SHORTEST + 77, 2 * TILE - 1, SHORTEST])
def test_a_row_knows_nothing_of_its_neighbours_in_memory(length: int) -> None:
    run = partial(modal_conv_mosaic_gpu, interpret=True)
    assert_row_keeps_to_itself(run, dict(case("", length, 2, run, batch=2).arrays), (1, 0))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_under_vmap() -> None:
    run = partial(modal_conv_mosaic_gpu, interpret=True)
    op_suite.check_vmap(case("two rows", TILE, 3, run, batch=2))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_a_stream_of_rows_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few programs wanted, rows follow one another in one; each row starts from its own state."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    run = partial(modal_conv_mosaic_gpu, interpret=True)
    op_suite.check_reference(case("three rows of full tiles", TILE, 4, run, batch=3, state=True))


@pytest.mark.slow(days=28, group="simulated convolutions")
def test_an_impulse_arrives_after_many_tiles_with_its_weight() -> None:
    """A mode of 32768 steps is carried from tile to tile in fp32: numbers of 8 bits would be off.

    Each output is rounded to bf16 once; the mean over many shows what lies below that.
    """
    length, impulse, slowest, weight = 16 * TILE, 128, 2.0**15, 1.003
    x = jnp.zeros((1, 1, length), jnp.bfloat16).at[0, 0, impulse].set(1.0)
    poles, residues = jnp.asarray([[-1 / slowest, -1.0]]), jnp.asarray([[weight, 0.5]])
    run = jax.jit(partial(modal_conv_mosaic_gpu, interpret=True))
    y = np.asarray(run(x, poles, residues), np.float64)[0, 0]
    late = np.arange(length // 2, length)
    exact = weight * np.exp(-(late - impulse) / slowest)
    assert_close(y[late], exact, jnp.bfloat16)
    assert_close(np.mean(y[late]), np.mean(exact), np.float32, length)
    assert not y[:impulse].any()


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("case", cases(partial(modal_conv, implementation="mosaic_gpu")), ids=str)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map", "poison"}))
@pytest.mark.parametrize("case", shared_cases(modal_conv_mosaic_gpu), ids=str)
def test_shared_tiles_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def check_norms(case: OpCase) -> None:
    """Values and gradients of millions of elements: streams in norm, of all, of each row and of each step.

    The table bounds an element's error by a multiple of what is usual, and of millions one is further off: of 2,112
    rows of 1,024 steps one value in XLA too, of 32 rows of 131,071 steps four values and eight gradients of streams.
    One wrong step or row is beyond the table in its norm.
    """
    y, gradients = op_suite.value_and_grads(case.run, case.arrays)
    cotangent = op_suite.random_cotangents(y).astype(jnp.float32)
    wide = {name: jnp.asarray(z, jnp.float32) for name, z in case.arrays.items()}
    exact, exact_gradients = op_suite.value_and_grads(case.reference, wide, cotangent)
    for name, want in ({"y": exact} | exact_gradients).items():
        found, terms = (y, case.terms) if name == "y" else (gradients[name], case.grad_terms)
        if want.ndim < 3:
            assert_close(found, want, jnp.bfloat16, terms, name)
            continue
        assert relative_rms(found, want) <= MOST_ERROR, name
        found, want = np.asarray(found, np.float64), np.asarray(want, np.float64)
        limit, square = bound(jnp.bfloat16, terms), np.mean(want**2)
        for axes in (2, (0, 1)):
            off, size = (np.sqrt(np.mean(z**2, axes)) for z in (found - want, want))
            assert np.all(off <= limit * (size + square**0.5)), f"{name}, norms over {axes}"


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("at", [None, (3, 1, 1000), (slice(None), 0, 4)], ids=str)
def test_norms_tell_one_wrong_element_or_step(at: Any) -> None:
    def run(**arrays: Any) -> Any:
        y = modal_conv(**arrays, implementation="xla")
        return y if at is None else y.at[at].add(jnp.bfloat16(3))

    given = case("", 1025, 2, run, batch=32)
    if at is None:
        check_norms(given)
        return
    with pytest.raises(AssertionError, match=r"^y"):
        check_norms(given)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(1024, 2048), (2112, 1024), (1090, 1536)])
def test_many_shared_tiles_on_a_gpu(batch: int, length: int) -> None:
    """Programs that take one tile after another, with every gradient."""
    op_suite.check_reference(case("", length, MODES, modal_conv_mosaic_gpu, batch=batch))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(1024, 2048), (2112, 1024), (1090, 1536)])
def test_norms_of_many_shared_tiles_on_a_gpu(batch: int, length: int) -> None:
    check_norms(case("", length, MODES, modal_conv_mosaic_gpu, batch=batch))


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_norms_of_long_rows_of_odd_length_on_a_gpu(streams: tuple[str, ...]) -> None:
    check_norms(case("", 131_071, MODES, modal_conv_mosaic_gpu, batch=32, streams=streams))


LENGTHS = [1025, 1088, 1600, 4095, 4097, 4160, 8191, 12289, 131071]


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_any_length_on_a_gpu(length: int, streams: tuple[str, ...]) -> None:
    """Values and gradients; 64 rows begin at every step of a chunk."""
    run = modal_conv_mosaic_gpu
    op_suite.check_reference(case("", length, MODES, run, batch=32, streams=streams, state=length < TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize("length", [SHORTEST, 2048, TILE, 8192, 3 * TILE + 77, 65536])
@pytest.mark.parametrize("streams", [ALL_STREAMS, ("x",)], ids=len)
def test_packed_on_a_gpu(length: int, streams: tuple[str, ...], check: str) -> None:
    run = partial(modal_conv, implementation="mosaic_gpu")
    ids = documents(length)
    state = length in (SHORTEST, 8192)
    op_suite.CHECKS[check](case("", length, MODES, run, batch=2, streams=streams, state=state, ids=ids))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [SHORTEST, 8192])
def test_documents_keep_to_themselves_on_a_gpu(length: int) -> None:
    run = partial(modal_conv, implementation="mosaic_gpu")
    arrays = case("", length, MODES, run, batch=2, ids=documents(length)).arrays
    assert_documents_keep_to_themselves(run, dict(arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_knows_nothing_of_its_neighbours_on_a_gpu(length: int) -> None:
    run = modal_conv_mosaic_gpu
    assert_row_keeps_to_itself(run, dict(case("", length, 2, run, batch=2).arrays), (1, 0))


@pytest.mark.gpu
def test_any_length_gives_the_same_bits_twice_on_a_gpu() -> None:
    """Rows that share a chunk are written by different programs."""
    run = modal_conv_mosaic_gpu
    arrays = case("", 2 * TILE - 1, MODES, run, batch=512).arrays
    backward = jax.jit(lambda arrays, dy: jax.vjp(lambda arrays: run(**arrays), arrays)[1](dy)[0])
    first, *others = (backward(dict(arrays), arrays["x"]) for _ in range(5))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "it takes bf16 streams, these are float32"),
        ({"modes": 17}, "at most 16 modes, not 17"),
        ({"length": SHORTEST - 1}, f"rows of {SHORTEST - 1} steps are shorter than {SHORTEST}"),
        (
            {"segment_ids": jax.ShapeDtypeStruct((1, TILE), jnp.int32), "output_final_state": True},
            "the state after packed rows",
        ),
        (
            {"pre_gate": jax.ShapeDtypeStruct((1, 3, TILE), jnp.float32)},
            "bf16 streams, these are bfloat16, float32",
        ),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"device": HOPPER, "length": TILE, "dtype": jnp.bfloat16, "modes": 8} | change
    device, length, dtype, modes = (call.pop(name) for name in ("device", "length", "dtype", "modes"))
    x, p = jax.ShapeDtypeStruct((1, 3, length), dtype), jax.ShapeDtypeStruct((3, modes), jnp.float32)
    assert reason in (why_not(device, x, p, p, **call) or "it can run")


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.length > 1], ids=lambda shape: shape.name)
def test_takes_the_shapes_of_real_models(shape: Any) -> None:
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    p = jax.ShapeDtypeStruct((shape.channels, shape.modes), jnp.float32)
    assert why_not(HOPPER, x, p, p, pre_gate=x, post_gate=x) is None


@pytest.mark.parametrize(
    ("batch", "length", "rows"),
    [(8, 2048, 2), (8, 1024, 4), (6, 1024, 2), (8, 1536, 2), (7, 1024, 1), (8, 2560, 1), (8, 1500, 1)],
)
def test_rows_share_a_tile_that_fit_it(batch: int, length: int, rows: int) -> None:
    assert rows_per_tile(batch, length) == rows


def test_takes_packed_rows() -> None:
    x, p = jax.ShapeDtypeStruct((1, 3, TILE), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, TILE), jnp.int32)
    assert explain(x, p, p, device=HOPPER, segment_ids=ids).startswith("modal_conv: mosaic_gpu")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            ModalConvShape("tiny", 1, CHANNELS, 2 * TILE, 16),
            marks=pytest.mark.slow(days=28, group="pages and gates of benchmarks"),
        ),
        pytest.param(
            ModalConvShape("packed", 1, CHANNELS, TILE, 16, documents=60),
            marks=pytest.mark.slow(days=28, group="simulated convolutions"),
        ),
    ],
    ids=lambda shape: shape.name,
)
def test_the_benchmark_passes_its_gate(shape: ModalConvShape) -> None:
    """Documents of the benchmark have no holes."""
    errors = check(bench.plan(shape, interpret=True), jax.random.key(0))
    assert set(errors) == {"xla", "mosaic_gpu"}
