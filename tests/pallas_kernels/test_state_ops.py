"""Ops with a matrix of state per head: the suite over packed rows and states; strong decay, splits, memory, length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels import op_suite
from tests.pallas_kernels.jla import as_others_write, needs_jla
from tests.pallas_kernels.linear_state import (
    check_as_the_loop,
    check_finite,
    check_long,
    dots,
    kept_bytes,
    largest,
    relative_rms,
    training_step,
)
from tests.pallas_kernels.op_suite import OpCase, value_and_grads
from tests.pallas_kernels.state_ops import (
    CASES,
    KINDS,
    LENGTH,
    call,
    case,
    check_with,
    gate_of,
    long_arrays,
    op_of,
)
from tests.tolerances import assert_close

PAIRS = [
    *((each, "reference") for each in CASES.values()),
    *((case(kind, 1, gated=False), "reference") for kind in ("log_gate", "beta")),
    *((case(kind, 19, jnp.bfloat16, chunk_size=8), "reference") for kind in ("log_key_gate", "beta")),
    *((CASES["log_gate"], check) for check in ("poison", "shard_map")),
    (CASES["log_value_gate"], "vmap"),
    (CASES["log_key_gate"], "remat"),
    *((CASES["beta"], check) for check in ("poison", "vmap", "shard_map", "remat")),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="*-21 steps-float32-reference")
@pytest.mark.parametrize(("case", "check"), PAIRS, ids=lambda x: str(x).replace(", ", "-"))
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="properties of kernels", every="beta-*")
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decay_is_exact_beside_weak_decay(kind: str, strong: float) -> None:
    """Reported of kernels that divide by exp of a sum: NaN, or gradients that are off."""
    given, gate = CASES[kind], gate_of(kind)
    pattern = np.random.default_rng(9).uniform(size=given.arrays[gate].shape) < 0.4
    check_with(given, {gate: jnp.where(pattern, strong, given.arrays[gate])})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_token_keep_their_state(kind: str) -> None:
    given = CASES[kind]
    ids = given.arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    (o, final), _ = value_and_grads(given.run, {**given.arrays, "segment_ids": ids})
    np.testing.assert_array_equal(final, given.arrays["initial_state"])
    assert not np.any(o)


@pytest.mark.parametrize("start", [2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_computed_as_if_apart(kind: str, start: int) -> None:
    """A document in the middle gives what it gives alone, wherever it begins in a chunk."""
    given, places = CASES[kind], np.arange(LENGTH)
    inside = (places >= start) & (places < start + 9)
    rows = given.arrays | {"initial_state": jnp.zeros_like(given.arrays["initial_state"])}
    found = []
    for ids in (np.where(inside, 2, np.where(places < start, 1, 3)), np.where(inside, 2, 0)):
        ids = jnp.asarray(np.stack([ids, ids]), jnp.int32)
        (o, _), _ = value_and_grads(given.run, {**rows, "segment_ids": ids})
        found.append(o[:, inside])
    assert_close(*found, n=given.terms)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_products_of_a_training_step(kind: str) -> None:
    """No array [time, keys, values]; backward keeps the inputs; products take bf16 and sum in fp32.

    Only the products that invert a matrix, in the delta rule, are fp32.
    """
    length, width, chunk = 4096, 32, 32
    arrays = {n: jnp.zeros_like(x) for n, x in long_arrays(kind, length, width=width).items()}
    op = partial(op_of(kind), chunk_size=chunk, implementation="xla")
    step = training_step(op, arrays)
    assert largest(step) <= length * width * width // chunk
    narrow = [kinds for kinds in dots(step) if "bfloat16" in kinds]
    assert set(narrow) == {("bfloat16", "bfloat16", "float32")}
    levels, passes = 5, 2  # of the inverse, in the forward pass and when backward repeats it
    assert len(dots(step)) - len(narrow) == (2 * levels * passes + 2 if kind == "beta" else 0)
    given = sum(x.nbytes for x in arrays.values())
    assert given <= kept_bytes(op, arrays) <= given + 16 * width * width


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("kind", KINDS)
def test_over_long_rows_in_bf16(kind: str) -> None:
    """Values and gradients against other chunks in fp32, and the last steps against one step after another."""
    length, width = (65_539, 8) if kind == "beta" else (131_075, 2)
    arrays = long_arrays(kind, length, width=width)
    o, _ = check_long(partial(call, kind, "xla", 64), partial(call, kind, "xla", 32), arrays)
    # Whatever lies 2,000 steps back has decayed to nothing.
    last = {n: x[:, -2000:].astype(jnp.float32) for n, x in arrays.items()}
    expected = op_of(kind)(**last, implementation="reference")
    assert relative_rms(o[:, -100:], expected[:, -100:]) <= 0.005


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("kind", KINDS)
def test_over_4_096_steps_in_fp32(kind: str) -> None:
    arrays = long_arrays(kind, 4096, width=8 if kind == "beta" else 2)
    check_as_the_loop(partial(call, kind, "xla", 32), partial(call, kind, "reference", 32), arrays)


@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_finite_over_a_million_steps(kind: str) -> None:
    """From hardly any decay to one that leaves e^-20, with beta up to 2, in chunks of 64."""
    check_finite(partial(call, kind, "xla", 64), long_arrays(kind, 1 << 20, decay=(-14, 3), most=2.0))


ON_A_GPU = [
    ("beta", "xla"),
    *(pytest.param(kind, "jla", marks=needs_jla) for kind in ("beta", "log_gate", "log_key_gate")),
    *((kind, "mosaic_gpu") for kind in KINDS if kind != "beta"),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("length", [65_536, 131_075])
@pytest.mark.parametrize(("kind", "implementation"), ON_A_GPU)
def test_long_rows_on_a_gpu(kind: str, implementation: str, length: int) -> None:
    with as_others_write():
        run, wide = partial(call, kind, implementation, 64), partial(call, kind, "xla", 32)
        check_long(run, wide, long_arrays(kind, length, 2, 128))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "implementation"), ON_A_GPU)
def test_a_million_steps_on_a_gpu(kind: str, implementation: str) -> None:
    with as_others_write():
        arrays = long_arrays(kind, 1 << 20, 1, 128, decay=(-14, 3), most=2.0)
        check_finite(partial(call, kind, implementation, 64), arrays)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("kind", ["log_key_gate", "beta"])
def test_f64_stays_f64(kind: str) -> None:
    given = CASES[kind]
    with jax.enable_x64(True):
        arrays = {n: x if n == "segment_ids" else np.asarray(x, np.float64) for n, x in given.arrays.items()}
        found, expected = (jax.jit(partial(call, kind, name, 4))(arrays) for name in ("xla", "reference"))
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == np.float64
            assert_close(got, want, np.float64, given.terms)


@pytest.mark.parametrize("kind", ["log_key_gate", "beta"])
def test_the_reference_has_second_derivatives(kind: str) -> None:
    arrays = {n: x for n, x in CASES[kind].arrays.items() if n != "segment_ids"}
    total = lambda x: op_of(kind)(**x, implementation="reference").sum()  # noqa: E731
    norm = lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(total)(x)))  # noqa: E731
    found = jax.eval_shape(jax.grad(norm), arrays)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, arrays)
