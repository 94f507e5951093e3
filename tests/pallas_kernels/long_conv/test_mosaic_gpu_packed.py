"""Packed rows in the Hopper kernels: simulated on the CPU with races watched, on a GPU the suite."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels._conv import packed
from pallas_kernels._conv.packed import LEAF, packed_causal
from pallas_kernels._conv.toeplitz import toeplitz_product
from pallas_kernels._dispatch import Device
from pallas_kernels.long_conv import explain, long_conv
from pallas_kernels.long_conv.blocks import BLOCK
from pallas_kernels.long_conv.mosaic_gpu import long_conv_mosaic_gpu
from pallas_kernels.long_conv.mosaic_gpu_packed import convolve_within_blocks
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.long_conv.test_mosaic_gpu import IN_SHARD_MAP
from tests.pallas_kernels.op_suite import OpCase
from tests.pallas_kernels.short_conv.streams import (
    CHANNELS,
    STREAMS,
    assert_gradients_are_apart,
    assert_packed_is_apart,
    no_token,
    normal,
    not_tokens,
    on_grid,
    ragged,
    streams,
)

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
bf16 = jnp.bfloat16
simulated = partial(long_conv_mosaic_gpu, interpret=True)
named = partial(long_conv, implementation="mosaic_gpu_vjp")


@pytest.fixture
def no_remat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated kernel cannot be run again for gradients; `make gpu-compile` compiles it so."""
    across: Any = packed.across_middles
    monkeypatch.setattr(packed, "across_middles", across.__wrapped__)


def arrays(length: int, taps: int, ids: Any, *, causal: bool = True, gates: bool = True) -> dict[str, Any]:
    width = taps if causal else 2 * taps - 1
    filter = jax.device_put(np.asarray(normal(4, (CHANNELS, width))) * np.float32(width**-0.5))
    return streams(length, bf16, gates=gates) | {"filter": filter, "segment_ids": ids}


def case(
    name: str,
    run: Any,
    length: int,
    taps: int,
    ids: Any,
    *,
    causal: bool = True,
    gates: bool = True,
    alignment: int = 1,
) -> OpCase:
    given = arrays(length, taps, ids, causal=causal, gates=gates)
    options = {"causal": causal, "segment_alignment": alignment}
    return OpCase(
        name=name,
        run=lambda arrays: run(**arrays, **options),
        reference=lambda arrays: long_conv(**arrays, **options, implementation="reference"),
        arrays=given,
        shared=frozenset({"filter", "bias"}) & set(given),
        unused=not_tokens(given),
        silent=no_token(given),
        terms=length,
        grad_terms=2 * length,
    )


def cases(run: Any) -> list[OpCase]:
    """Halves of 512 and 1,024 steps; blocks of a grid; a filter shorter than a block, and longer than a row, both ways;
    one document.
    """
    both_ways = {"causal": False, "gates": False}
    return [
        case("halves", run, 1100, 1100, ragged(1100)),
        case("on a grid of 700", run, 1500, 2000, on_grid(1500, 700), alignment=700),
        case("short filter, both ways", run, 1100, 400, ragged(1100), **both_ways),
        case("many taps and gates, both ways", run, 600, 900, ragged(600), causal=False),
        case("holes in one document", run, 600, 600, on_grid(600, 600), alignment=600),
    ]


def of_many_sizes(length: int) -> dict[str, Any]:
    """Documents whose inputs are 1e4 and 1e-4 in turn, which one scale would not hold."""
    ids = ragged(length)
    given = arrays(length, length, ids)
    return given | {"x": given["x"] * sizes(ids)}


def sizes(ids: Any) -> Any:
    """1e4 for documents of even numbers, 1e-4 for others."""
    return jnp.where(ids % 2 == 0, 1e4, 1e-4).astype(bf16)[:, None]


def in_bf16(run: Any) -> Any:
    """The op on streams that were cut apart in fp32."""
    return lambda **arrays: run(**{n: z.astype(bf16) if n in STREAMS else z for n, z in arrays.items()})


def long_cases(run: Any) -> list[OpCase]:
    return [
        *cases(run),
        case("long halves", run, 8000, 8000, ragged(8000)),
        case("long halves, both ways", run, 5000, 7000, ragged(5000), causal=False),
    ]


def assert_the_same_bits_twice(case: OpCase) -> None:
    first, second = (jax.tree.leaves(op_suite.value_and_grads(case.run, case.arrays)) for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert np.asarray(once).tobytes() == np.asarray(again).tobytes()


@pytest.mark.usefixtures("no_races", "no_remat")
@pytest.mark.slow(days=28, group="simulated convolutions")
@pytest.mark.parametrize("check", ["reference", "poison"])
@pytest.mark.parametrize("case", cases(simulated), ids=str)
def test_simulated(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_documents_are_computed_as_if_apart() -> None:
    assert_packed_is_apart(in_bf16(simulated), of_many_sizes(1100), n=1100)


@pytest.mark.usefixtures("no_races", "no_remat")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_gradients_are_those_of_documents_apart() -> None:
    """Cotangents are small where inputs are large."""
    assert_gradients_are_apart(in_bf16(simulated), of_many_sizes(600), n=1200, dy_size=1 / sizes(ragged(600)))


@pytest.mark.usefixtures("no_races")
@pytest.mark.slow(days=28, group="simulated convolutions")
def test_simulated_blocks_of_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of 64 blocks follow one another, the last nearly empty."""
    monkeypatch.setattr(_hopper, "PROGRAMS", 1)
    run = partial(convolve_within_blocks, interpret=True)
    assert_blocks_are_right(run, batch=66, channels=1, most=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [1, _hopper.PROGRAMS])
def test_blocks_on_a_gpu(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper, "PROGRAMS", programs)
    run = partial(convolve_within_blocks, interpret=False)
    assert_blocks_are_right(run, batch=700, channels=5, most=0.05)


def assert_blocks_are_right(run: Any, *, batch: int, channels: int, most: float) -> None:
    """Beside the same by halves in fp32, with documents that start at random, at most that often."""
    draw = np.random.default_rng(0)
    starts = draw.random((batch, BLOCK)) < draw.choice([0.0, most / 4, most], (batch, 1))
    documents = jnp.asarray(1 + np.cumsum(starts, 1), jnp.int32)
    given = {"u": normal(0, (batch, channels, BLOCK), bf16), "filter": normal(1, (channels, 300)) / 16}
    op_suite.check_reference(
        OpCase(
            name="blocks",
            run=lambda arrays: run(arrays["u"], arrays["filter"], documents),
            reference=lambda arrays: packed_causal(
                arrays["u"],
                arrays["filter"],
                documents,
                leaf=LEAF,
                block=BLOCK,
                product_of=lambda size: toeplitz_product,
            ),
            arrays=given,
            terms=BLOCK,
            grad_terms=batch * BLOCK,
        )
    )


LENGTHS = (1024, 1500, 4096, 8191, 16_384, 32_768)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_documents_are_computed_as_if_apart_on_a_gpu(length: int) -> None:
    assert_packed_is_apart(in_bf16(named), of_many_sizes(length), n=length)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_are_those_of_documents_apart_on_a_gpu(length: int) -> None:
    dy_size = 1 / sizes(ragged(length))
    assert_gradients_are_apart(in_bf16(named), of_many_sizes(length), n=2 * length, dy_size=dy_size)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_packed_rows_have_the_same_bits_twice_on_a_gpu(length: int, causal: bool) -> None:
    assert_the_same_bits_twice(case("twice", named, length, length, ragged(length), causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("check", sorted(op_suite.CHECKS.keys() - {"shard_map"}))
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=f"vjp-{case}") for case in long_cases(named)],
)
def test_on_a_gpu(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize("run", IN_SHARD_MAP)
def test_inside_shard_map(run: Any) -> None:
    op_suite.check_shard_map(cases(run)[0])


@pytest.mark.parametrize(
    ("length", "first", "said"),
    [
        (8192, "mosaic_gpu_vjp", "mosaic_gpu_half: its GPU tests are of one document a row"),
        (1000, "xla", "mosaic_gpu_vjp: it has not been timed below 1,024 steps"),
        (40_000, "xla", "mosaic_gpu_vjp: packed rows above 32,768 steps have not run in it"),
    ],
)
def test_packed_rows_take_their_kernels_where_they_were_timed(length: int, first: str, said: str) -> None:
    x, filter = jax.ShapeDtypeStruct((1, 64, length), bf16), jax.ShapeDtypeStruct((64, length), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    told = explain(x, filter, device=HOPPER, segment_ids=ids)
    assert told.startswith(f"long_conv: {first} on ")
    assert said in told
