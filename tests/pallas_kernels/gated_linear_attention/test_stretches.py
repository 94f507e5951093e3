"""Rows cut into stretches: the suite by XLA, one simulated call of the Hopper kernels, and how many there are."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels._dispatch import Device
from pallas_kernels.gated_linear_attention import explain
from pallas_kernels.gated_linear_attention.mosaic_gpu import _split, gated_linear_attention_mosaic_gpu
from pallas_kernels.gated_linear_attention.stretches import (
    PROGRAMS,
    count_stretches,
    in_stretches,
    rather_not,
    why_not,
)
from pallas_kernels.gated_linear_attention.xla import gated_linear_attention_xla
from tests.pallas_kernels import op_suite, state_ops
from tests.pallas_kernels.gated_linear_attention import test_mosaic_gpu
from tests.pallas_kernels.linear_state import KEYS, equations
from tests.pallas_kernels.op_suite import OpCase, reference_and_grads, value_and_grads
from tests.pallas_kernels.state_ops import GATES
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
LENGTH = 37


def by_xla(count: int, arrays: dict[str, Any]) -> Any:
    return in_stretches(
        gated_linear_attention_xla,
        **arrays,
        count=count,
        output_final_state=True,
        scale=KEYS**-0.5,
        chunk_size=4,
    )


@cache
def case(gate: str | None, count: int) -> OpCase:
    """Return one case for all tests, which share its programs."""
    whole = state_ops.case(gate or "log_gate", LENGTH, gated=gate is not None)
    return replace(whole, name=f"{gate}-{count}", run=partial(by_xla, count))


PAIRS = [
    *((case(gate, 5), "reference") for gate in (None, *GATES)),
    (case("log_value_gate", 2), "reference"),
    *((case("log_value_gate", 5), check) for check in ("poison", "vmap", "shard_map", "remat")),
    (case("log_key_gate", 5), "poison"),
]


@pytest.mark.slow(
    days=28, group="properties of kernels", every=("log_value_gate-5-reference", "log_value_gate-5-poison")
)
@pytest.mark.parametrize(("case", "check"), PAIRS, ids=str)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def rows(*parts: tuple[int, int]) -> np.ndarray:
    """One row of ids, of (id, steps)."""
    return np.repeat([part[0] for part in parts], [part[1] for part in parts]).astype(np.int32)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "ids",
    [
        (
            rows((0, 17), (1, 20)),
            rows((1, 8), (2, 29)),
        ),  # padding is two stretches; a document begins with one
        (rows((1, 9), (0, 14), (1, 14)), rows((1, 9), (0, 14), (2, 14))),  # padding inside, and between two
        (rows((1, 6), (-1, 10), (1, 21)), rows((1, 6), (-2, 10), (3, 21))),  # a stretch of holes
        (rows((0, 37)), rows((-4, 30), (4, 7))),
    ],
    ids=["begin", "padding", "holes", "nothing"],
)
def test_states_that_enter_are_of_the_stretch_s_document(gate: str, ids: tuple[Any, Any]) -> None:
    given = case(gate, 5)
    arrays = given.arrays | {"segment_ids": jnp.asarray(np.stack(ids))}
    found = value_and_grads(given.run, arrays)
    expected = reference_and_grads(given, arrays)
    for name in found[1]:
        assert_close(found[1][name], expected[1][name], n=given.grad_terms)
    for got, want in zip(found[0], expected[0], strict=True):
        assert_close(got, want, n=given.terms)


@pytest.mark.slow(days=28, group="properties of kernels", turn="strong decay over stretches")
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_is_exact_beside_weak_decay(strong: float) -> None:
    for gate in GATES:
        given = case(gate, 5)
        pattern = np.random.default_rng(9).uniform(size=given.arrays[gate].shape) < 0.4
        arrays = {**given.arrays, gate: jnp.where(pattern, strong, given.arrays[gate])}
        found = value_and_grads(given.run, arrays)
        expected = reference_and_grads(given, arrays)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(got, want, n=given.grad_terms)


@pytest.mark.slow(days=28, group="simulated kernels")
def test_simulated(simulation: Any) -> None:
    run = partial(gated_linear_attention_mosaic_gpu, interpret=simulation)
    test_mosaic_gpu.check_reference(
        test_mosaic_gpu.case(partial(in_stretches, run, count=2), "log_value_gate", 64, 64, 1, 1, 140)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("call", test_mosaic_gpu.LARGE[1::4], ids=str)
@pytest.mark.parametrize("check", ["reference", "poison"])
def test_on_a_gpu(check: str, call: Any, count: int) -> None:
    run = partial(in_stretches, gated_linear_attention_mosaic_gpu, count=count)
    given = test_mosaic_gpu.case(run, *call, batch=2)
    (test_mosaic_gpu.check_reference if check == "reference" else op_suite.CHECKS[check])(given)


@pytest.mark.parametrize(
    ("call", "gate", "count"),
    [
        ((1, 16_384, 8, 64, 64), "value", 16),
        ((1, 16_384, 8, 64, 128), "value", 16),
        ((1, 16_384, 8, 64, 128), "key", 8),
        ((1, 16_384, 8, 128, 128), "key", 16),
        ((1, 16_384, 8, 64, 192), "value", 5),
        ((1, 16_384, 8, 128, 128), "value", 16),
        ((1, 16_384, 8, 128, 256), "key", 8),
        ((1, 16_384, 8, 512, 64), "value", 4),
        ((8, 8192, 8, 64, 128), "value", 2),
        ((8, 8192, 32, 64, 128), "value", 1),
        ((1, 4096, 8, 64, 64), "value", 8),
        ((1, 1024, 8, 64, 128), "value", 2),
        ((1, 1023, 8, 64, 128), "value", 1),
        ((4, 2048, 8, 64, 128), "value", 4),
        ((1, 16_384, 8, 128, 64), "value", 16),
        ((8, 8192, 8, 128, 64), "value", 2),
        ((1, 1000, 1, 64, 64), "value", 1),
        ((1, 1_048_576, 1, 64, 64), "value", 132),
    ],
)
def test_as_many_programs_as_run_at_a_time(call: tuple[int, ...], gate: Any, count: int) -> None:
    batch, length, heads, *widths = call
    x, v = (jax.ShapeDtypeStruct((batch, length, heads, n), jnp.bfloat16) for n in widths)
    assert count_stretches(x, v, by_key=gate == "key") == count
    pieces = -(-widths[0] // 128)  # of wide keys, a program each in the kernel of states
    split = []
    jax.eval_shape(lambda k, v: split.append(_split(k, v, gate, 1.0, None)), x, v)
    assert count == 1 or batch * count * split[0].heads * pieces <= PROGRAMS
    options = {f"log_{gate}_gate": x if gate == "key" else v}
    whole = f"{batch} rows of {length} steps with {heads} heads are run whole"
    assert why_not(HOPPER, x, x, v, **options) == (None if count > 1 else whole)
    said = explain(x, x, v, device=HOPPER, **options)
    if count == 1:
        assert f"not mosaic_gpu_stretches: {whole}" in said
    elif gate == "key" and count < 16:
        assert "without gates per value channel 16 stretches of heads of 128 channels were timed" in said
    elif widths[0] > 128:
        assert f"it was timed with keys of up to 128 channels, got {widths[0]}" in said
    else:
        assert said.startswith("gated_linear_attention: mosaic_gpu_stretches")


@pytest.mark.parametrize(
    ("length", "heads", "width", "found"),
    [
        (16_384, 8, 128, None),
        (8192, 8, 128, None),
        (8191, 8, 128, "not 15 of 128 and 128"),
        (16_384, 9, 128, "not 14 of 128 and 128"),
        (16_384, 8, 64, "not 16 of 64 and 64"),
    ],
)
@pytest.mark.parametrize("gate", ["log_gate", "log_key_gate", None])
def test_other_gates_are_cut_as_was_timed(
    length: int, heads: int, width: int, found: str | None, gate: str | None
) -> None:
    x = jax.ShapeDtypeStruct((1, length, heads, width), jnp.bfloat16)
    of_gate = jax.ShapeDtypeStruct(x.shape[: 3 if gate == "log_gate" else 4], jnp.float32)
    said = rather_not(HOPPER, x, x, x, **({gate: of_gate} if gate else {}))
    assert said is None if found is None else str(said).endswith(found)


@pytest.mark.parametrize(("length", "refused"), [(8_388_480, False), (8_388_481, True)])
def test_a_grid_holds_chunks_of_stretches(length: int, refused: bool) -> None:
    """Rows of twice as many steps as `mosaic_gpu` takes, cut in two."""
    x = jax.ShapeDtypeStruct((1, length, 66, 64), jnp.bfloat16)
    assert count_stretches(x, x, by_key=False) == 2
    assert ("at most 65535 chunks" in str(why_not(HOPPER, x, x, x, log_value_gate=x))) == refused


def test_rows_shorter_than_a_chunk_are_not_filled_up_to_one() -> None:
    given = case("log_gate", 1)
    short = {n: x[:, :5] if n != "initial_state" else x for n, x in given.arrays.items()}
    program = jax.make_jaxpr(partial(in_stretches, gated_linear_attention_xla, count=1, chunk_size=4096))
    found = program(**{n: x for n, x in short.items() if n != "segment_ids"})
    lengths = {x.aval.shape[1] for e in equations(found.jaxpr) for x in e.outvars if len(x.aval.shape) == 4}
    assert max(lengths) <= 8


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_linear_attention/test_stretches")
@pytest.mark.parametrize("name", ["segment_ids", "v"])
def test_arrays_that_differ_over_an_axis_that_others_do_not(name: str) -> None:
    """Inside `shard_map`: one array has rows of the device, the others are the same on all."""
    given = case("log_value_gate", 5)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    halves = np.asarray(given.arrays[name]), np.asarray(given.arrays[name])[::-1]
    own = np.concatenate(halves)
    rest = {n: x for n, x in given.arrays.items() if n != name}
    specs = (P("data"), jax.tree.map(lambda _: P(), rest))

    @jax.jit
    def run(own: Any, rest: Any) -> Any:
        return given.run(rest | {name: own})[0]

    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data")))(own, rest)
    assert_close(found, np.concatenate([run(half, rest) for half in halves]), n=given.terms)
