"""Rows cut into stretches: the suite by XLA, one simulated call of the Hopper kernels, and how many there are."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.gated_linear_attention import explain
from pallas_kernels.gated_linear_attention.mosaic_gpu import gated_linear_attention_mosaic_gpu
from pallas_kernels.gated_linear_attention.stretches import count_stretches, in_stretches, why_not
from pallas_kernels.gated_linear_attention.xla import gated_linear_attention_xla
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.gated_linear_attention import test_gated_linear_attention, test_mosaic_gpu
from tests.pallas_kernels.linear_state import KEYS
from tests.pallas_kernels.op_suite import OpCase, value_and_grads
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
GATES = test_gated_linear_attention.GATES
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


def case(gate: str | None, count: int) -> OpCase:
    whole = test_gated_linear_attention.case(gate, LENGTH)
    return replace(whole, name=f"{gate}-{count}", run=partial(by_xla, count))


PAIRS = [
    *((case(gate, 5), "reference") for gate in (None, *GATES)),
    (case("log_value_gate", 2), "reference"),
    *((case("log_value_gate", 5), check) for check in ("poison", "vmap", "shard_map", "remat")),
    (case("log_key_gate", 5), "poison"),
]


@pytest.mark.slow(weeks=3, every=("*-reference", "*-poison"))
@pytest.mark.parametrize(("case", "check"), PAIRS, ids=str)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def rows(*parts: tuple[int, int]) -> np.ndarray:
    """One row of ids, of (id, steps)."""
    return np.repeat([part[0] for part in parts], [part[1] for part in parts]).astype(np.int32)


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
    expected = value_and_grads(given.reference, arrays, optimised=True)
    for name in found[1]:
        assert_close(found[1][name], expected[1][name], n=given.grad_terms)
    for got, want in zip(found[0], expected[0], strict=True):
        assert_close(got, want, n=given.terms)


@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_is_exact_beside_weak_decay(strong: float) -> None:
    for gate in GATES:
        given = case(gate, 5)
        pattern = np.random.default_rng(9).uniform(size=given.arrays[gate].shape) < 0.4
        arrays = {**given.arrays, gate: jnp.where(pattern, strong, given.arrays[gate])}
        found, wanted = value_and_grads(given.run, arrays), value_and_grads(given.reference, arrays)
        for name in found[1]:
            assert_close(found[1][name], wanted[1][name], n=given.grad_terms)


@pytest.mark.slow(weeks=13, group="simulated kernels")
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
    ("call", "count"),
    [
        ((1, 16_384, 8, 64, 64), 16),
        ((1, 16_384, 8, 64, 256), 8),
        ((1, 16_384, 8, 512, 64), 4),
        ((8, 8192, 8, 64, 128), 2),
        ((8, 8192, 32, 64, 128), 1),
        ((1, 4096, 8, 64, 64), 8),
        ((1, 1000, 1, 64, 64), 1),
        ((1, 1_048_576, 1, 64, 64), 132),
    ],
)
def test_as_many_programs_as_run_at_a_time(call: tuple[int, ...], count: int) -> None:
    batch, length, heads, *widths = call
    x, v = (jax.ShapeDtypeStruct((batch, length, heads, n), jnp.bfloat16) for n in widths)
    assert count_stretches(x, v) == count
    whole = f"{batch} rows of {length} steps with {heads} heads are run whole"
    assert why_not(HOPPER, x, x, v) == (None if count > 1 else whole)
    said = explain(x, x, v, log_value_gate=v, device=HOPPER)
    assert f"not mosaic_gpu_stretches: {'it was not timed' if count > 1 else whole}" in said
