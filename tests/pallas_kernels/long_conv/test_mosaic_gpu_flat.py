"""Rows that the Hopper kernel reads where they lie: what is cut out and joined, simulated, and on a GPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels.long_conv import mosaic_gpu
from pallas_kernels.long_conv.hopper import LONGEST_ON_CHIP, Ring
from pallas_kernels.long_conv.mosaic_gpu_flat import Flat
from pallas_kernels.runtime import compiling_for
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import HOPPER as GPU
from tests.pallas_kernels.linear_state import equations
from tests.pallas_kernels.long_conv.test_mosaic_gpu import (
    FORMS,
    assert_near_rounding,
    case,
    drawn,
    halves,
    named,
    outputs,
    simulated,
)
from tests.pallas_kernels.op_suite import OpCase

bf16 = jnp.bfloat16
BOTH = ("pre_gate", "post_gate")


@pytest.mark.parametrize(
    ("length", "batch", "edges", "wraps"),
    [
        (513, 8, [0, 8, 9], False),
        (1000, 4, [0, 15], True),
        (1023, 4, [0, 15], True),
        (1000, 3, [0, 15, 16], False),
        (4095, 1, [0, 63], True),
        (4160, 1, [], False),
        (8128, 1, [], False),
        (8129, 1, [0, 127], False),
        (8130, 1, [0, 127], False),
        (8131, 1, [0, 127], True),
        (12_289, 1, [0, 192, 193], False),
    ],
)
def test_edges(length: int, batch: int, edges: list[int], wraps: bool) -> None:
    found = Flat(Ring.of(length, batch), length, batch * 3)
    assert (found.edges, found.wraps) == (edges, wraps)


@pytest.mark.parametrize("length", [577, 1000, 1023, 2047, 4095, 4160, 8131, 8190, 8191, 12_289])
def test_edges_hold_what_chunks_do_not(length: int) -> None:
    """A result whose shared chunks are poison is put together from its edges; so is the last chunk of all."""
    z = np.arange(1, 5 * length + 1, dtype=np.float32).reshape(1, 5, length)
    rows = Flat(Ring.of(length, 1), length, 5)
    shared = np.arange(6 * rows.ragged) * length // 64

    def poisoned(z: Any) -> Any:
        chunks, *edges = rows.enter(z)
        return rows.leave([chunks.at[shared].set(jnp.nan, mode="drop"), *edges], z.shape)

    assert np.array_equal(jax.jit(poisoned)(z), z)


@pytest.mark.parametrize("length", [513, 1023, 2047, 4095, 4160, 8191, 12_289, 16_383])
def test_pieces_are_each_chunk_of_a_ring_once(length: int) -> None:
    rows = Flat(Ring.of(length, 4), length, 4)
    for m in range(rows.ring.classes):
        pieces = rows.pieces(m)
        chunks = [chunk for first, count, _ in pieces for chunk in range(first, first + count)]
        assert chunks == list(range(rows.ring.height))
        assert all(count == 1 for _, count, edge in pieces if edge is not None)
    found = [edge for m in range(rows.ring.classes) for *_, edge in rows.pieces(m) if edge is not None]
    assert found == list(range(len(rows.edges)))


def kernels(length: int) -> tuple[list[str], list[Any]]:
    """Of values and gradients of 64 rows on a GPU, what copies a stream, and the kernels."""
    x, taps = jax.ShapeDtypeStruct((8, 8, length), bf16), jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def loss(x: Any, filter: Any, pre_gate: Any, post_gate: Any) -> Any:
        y = named(x, filter, pre_gate=pre_gate, post_gate=post_gate)
        return jnp.sum(y.astype(jnp.float32))

    with compiling_for(GPU):
        program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, taps, x, x)
    found = list(equations(program.jaxpr))
    # What pads by nothing is no copy.
    copies = [
        e.primitive.name
        for e in found
        if e.primitive.name in ("pad", "slice", "concatenate")
        and max(z.aval.size for z in e.invars) != e.outvars[0].aval.size >= 64 * length
    ]
    return copies, [e for e in found if e.primitive.name == "mpmd_map"]


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/long_conv/test_mosaic_gpu_flat")
@pytest.mark.parametrize("length", [1023, 4095, 4160, 8191])
def test_no_stream_is_copied(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of padded rows x and both gates are, twice, dy once, and four results are cut."""
    copies, run = kernels(length)
    assert len(run) == 2
    assert not copies
    monkeypatch.setattr(mosaic_gpu, "is_read_flat", lambda *_: False)
    copies, run = kernels(length)
    assert len(run) == 2
    assert sorted(copies) == ["pad"] * 7 + ["slice"] * 4


@pytest.mark.parametrize("length", [8192, LONGEST_ON_CHIP - 1])
def test_other_rows_are_as_padded_ones(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 512, and rows that two warpgroups share."""
    found = kernels(length)
    monkeypatch.setattr(mosaic_gpu, "is_read_flat", lambda *_: False)
    assert [str(e) for e in kernels(length)[1]] == [str(e) for e in found[1]]


CASES = [
    pytest.param((4, 2, 1023), 300, True, BOTH, 1e-4, id="four rows in a tile"),
    pytest.param((2, 3, 2047), 2047, False, ("post_gate",), 1.0, id="two rows in a tile, both ways"),
    pytest.param((3, 3, 1000), 1000, True, ("pre_gate",), 1e4, id="a short row in a tile"),
    pytest.param((2, 3, 4095), 4095, True, (), 1.0, id="a tile a row"),
    pytest.param((1, 5, 8191), 8191, True, BOTH, 1e4, id="two classes"),
    pytest.param((1, 3, 8131), 8131, False, BOTH, 1.0, id="two classes, both ways"),
    pytest.param((1, 3, 8128), 8128, True, BOTH, 1.0, id="whole chunks"),
    pytest.param((1, 3, 12_289), 9000, False, BOTH, 1e-4, id="four classes"),
    pytest.param((1, 3, 16_383), 16_383, True, ("post_gate",), 1.0, id="four classes, full"),
]


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(("shape", "taps", "causal", "gates", "size"), CASES)
def test_simulated(
    shape: tuple[int, int, int], taps: int, causal: bool, gates: tuple[str, ...], size: float
) -> None:
    assert_near_rounding(simulated, drawn(shape, taps, causal=causal, gates=gates, size=size), causal)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((16, 1, 513), jnp.float32, id="four tiles of four rows"),
        pytest.param((16, 1, 1023), jnp.float16, id="four tiles of four rows, in halves"),
        pytest.param((3, 3, 4095), jnp.float32, id="three tiles"),
        pytest.param((3, 1, 8191), jnp.float16, id="three rows of two tiles, in halves"),
    ],
)
def test_simulated_rows_of_one_program(
    shape: tuple[int, int, int], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    arrays = drawn(shape, 300, causal=True, gates=BOTH)
    assert_near_rounding(partial(simulated, dtype=dtype), arrays, True)


def assert_rows_keep_to_themselves(run: Any, shape: tuple[int, int, int]) -> None:
    """NaN in all streams and the cotangent of every other channel changes no bit of the others' rows."""
    arrays = drawn(shape, 300, causal=True, gates=BOTH)
    streams = ("x", "dy", *BOTH)
    arrays = arrays | {"dy": arrays["x"][::-1]}
    poisoned = {n: z.at[:, 1::2].set(jnp.nan) if n in streams else z for n, z in arrays.items()}
    compiled = jax.jit(lambda arrays: outputs(run, arrays, True))
    clean, found = compiled(arrays), compiled(poisoned)
    for name in ("y", "x", *BOTH):
        assert np.array_equal(clean[name][:, ::2], found[name][:, ::2]), name
        assert np.isnan(np.asarray(found[name][:, 1::2], np.float32)).all(), name
    for name in ("filter", "bias"):
        assert np.array_equal(clean[name][::2], found[name][::2]), name


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("length", [1023, 4095, 8191])
def test_simulated_rows_keep_to_themselves(length: int) -> None:
    assert_rows_keep_to_themselves(simulated, (2, 3, length))


LENGTHS = (513, 1000, 1023, 2047, 4095, 4160, 8128, 8191, 10_000, 12_289, 16_383)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("causal", "size", "share"), FORMS)
@pytest.mark.parametrize("batch", [4, 7])
@pytest.mark.parametrize("run", [named, halves], ids=["vjp", "half"])
def test_errors_on_a_gpu(length: int, causal: bool, size: float, share: float, batch: int, run: Any) -> None:
    arrays = drawn((batch, 97, length), int(share * length), causal=causal, gates=BOTH, size=size)
    assert_near_rounding(run, arrays, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("gates", [(), ("pre_gate",), ("post_gate",), BOTH])
def test_rows_of_one_program_on_a_gpu(
    length: int, gates: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    arrays = drawn((12 if length <= 1024 else 14, 5, length), length, causal=True, gates=gates)
    assert_near_rounding(named, arrays, True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_keep_to_themselves_on_a_gpu(length: int) -> None:
    assert_rows_keep_to_themselves(named, (8, 97, length))


def cases(run: Any) -> list[OpCase]:
    return [
        case("four rows in a tile", 1023, 300, run, batch=8),
        case("two rows in a tile, both ways", 1500, 2000, run, causal=False, gates=("post_gate",)),
        case("a tile a row", 4095, 4096, run, gates=("pre_gate",)),
        case("two classes", 8191, 4000, run, batch=3),
        case("four classes", 12_289, 3000, run),
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
