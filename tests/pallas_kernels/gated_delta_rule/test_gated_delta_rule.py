"""gated_delta_rule: the suite over packed rows and states; strong decay, beta up to 2, splits, memory, errors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.gated_delta_rule import (
    bench,
    gated_delta_rule,
    gated_delta_rule_adjoint,
    gated_delta_rule_summary,
)
from pallas_kernels.gated_delta_rule.inverse import unit_lower_inverse
from pallas_kernels.gated_delta_rule.shapes import DeltaRuleShape
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.jla import as_others_write, needs_jla
from tests.pallas_kernels.linear_state import (
    BATCH,
    HEADS,
    KEYS,
    check_as_the_loop,
    check_finite,
    check_long,
    dots,
    heads,
    kept_bytes,
    largest,
    log_gates,
    packed,
    relative_rms,
    state_case,
    training_step,
)
from tests.pallas_kernels.op_suite import OpCase, random_cotangents, reference_and_grads, value_and_grads
from tests.tolerances import assert_close

LENGTH = 21


def call(implementation: Any, chunk_size: int, arrays: dict[str, Any]) -> Any:
    options = {"chunk_size": chunk_size, "implementation": implementation}
    return gated_delta_rule(**arrays, **options, output_final_state=True)


def case(
    name: str, length: int = LENGTH, dtype: Any = jnp.float32, *, gated: bool = True, chunk_size: int = 4
) -> OpCase:
    arrays = heads(length, dtype) | {"segment_ids": packed(length)}
    beta = np.random.default_rng(5).uniform(0, 2, (BATCH, length, HEADS))
    arrays["beta"] = jax.device_put(beta.astype(np.float32))
    if gated:
        arrays["log_gate"] = log_gates(4, (BATCH, length, HEADS))
    return state_case(name, partial(call, "xla", chunk_size), partial(call, "reference", chunk_size), arrays)


GATED = case("gated")
PAIRS = [
    (GATED, "reference"),
    (case("one step", 1, gated=False), "reference"),
    (case("bf16, two chunks", 15, jnp.bfloat16, chunk_size=8), "reference"),
    *((GATED, check) for check in ("poison", "vmap", "shard_map", "remat")),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="gated*-reference")
@pytest.mark.parametrize(("case", "check"), PAIRS, ids=str)
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def assert_is_the_reference(change: dict[str, Any]) -> None:
    """Values and gradients of the gated case with other arrays; its programs are compiled already."""
    arrays = {**GATED.arrays, **change}
    actual = value_and_grads(GATED.run, arrays)
    expected = reference_and_grads(GATED, arrays)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(got, want, n=GATED.grad_terms)


@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_is_exact_beside_weak_decay(strong: float) -> None:
    gate = GATED.arrays["log_gate"]
    pattern = np.random.default_rng(9).uniform(size=gate.shape) < 0.4
    assert_is_the_reference({"log_gate": jnp.where(pattern, strong, gate)})


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_replacing_nothing_all_or_twice(beta: float) -> None:
    """2 reflects the state at one key again and again, and nothing decays."""
    one_key = jnp.broadcast_to(GATED.arrays["k"][:, :1], GATED.arrays["k"].shape)
    change = {"beta": jnp.full_like(GATED.arrays["beta"], beta), "k": one_key}
    assert_is_the_reference(change | {"log_gate": jnp.zeros_like(GATED.arrays["log_gate"])})


@pytest.mark.slow(days=28, group="properties of kernels")
def test_gates_bound_what_keys_that_are_too_long_would_blow_up() -> None:
    """The inverse without the gates would overflow fp32 within one chunk of 64."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 64, 1, 4)), jnp.float32) for _ in range(3))
    arrays = {
        "q": q,
        "k": 4 * k,
        "v": v,
        "beta": jnp.full((1, 64, 1), 2.0),
        "log_gate": jnp.full((1, 64, 1), -50.0),
    }
    o, expected = (jax.jit(partial(call, name, 64))(arrays)[0] for name in ("xla", "reference"))
    assert_close(o, expected, n=64)


def test_rows_without_a_token_keep_their_state() -> None:
    ids = GATED.arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    (o, final), _ = value_and_grads(GATED.run, {**GATED.arrays, "segment_ids": ids})
    np.testing.assert_array_equal(final, GATED.arrays["initial_state"])
    assert not np.any(o)


@pytest.mark.parametrize("start", [2, 5, 8])
def test_documents_are_computed_as_if_apart(start: int) -> None:
    """A document in the middle gives what it gives alone, wherever it begins in a chunk."""
    places = np.arange(LENGTH)
    inside = (places >= start) & (places < start + 9)
    rows = GATED.arrays | {"initial_state": jnp.zeros_like(GATED.arrays["initial_state"])}
    found = []
    for ids in (np.where(inside, 2, np.where(places < start, 1, 3)), np.where(inside, 2, 0)):
        ids = jnp.asarray(np.stack([ids, ids]), jnp.int32)
        (o, _), _ = value_and_grads(GATED.run, {**rows, "segment_ids": ids})
        found.append(o[:, inside])
    assert_close(*found, n=GATED.terms)


@pytest.mark.slow(days=28, group="costly")
def test_pieces_are_one_stream_and_their_summaries_join() -> None:
    # Slices of NumPy arrays are no programs
    given = {n: np.asarray(x) for n, x in GATED.arrays.items() if n != "segment_ids"}
    arrays = {n: x for n, x in given.items() if n != "initial_state"}
    state = given["initial_state"]
    run = jax.jit(partial(gated_delta_rule, output_final_state=True, chunk_size=4))
    summarise = jax.jit(partial(gated_delta_rule_summary, chunk_size=4))
    reference = jax.jit(partial(call, "reference", 4))
    whole, final = reference(given)
    found, joined, product = [], state, np.eye(KEYS, dtype=np.float32)
    for start in (0, 7, 14):
        piece = {n: x[:, start : start + 7] for n, x in arrays.items()}
        transition, left, _ = map(np.asarray, summarise(**piece))
        joined, product = transition @ joined + left, transition @ np.broadcast_to(product, transition.shape)
        o, state = run(**piece, initial_state=state)
        found.append(o)
        assert_close(joined, state, n=LENGTH)
    assert_close(np.concatenate(found, 1), whole, n=LENGTH)
    assert_close(state, final, n=LENGTH)
    silent = {**given, "v": np.zeros_like(arrays["v"])}
    assert_close(product @ given["initial_state"], reference(silent)[1], n=LENGTH)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/gated_delta_rule/test_gated_delta_rule")
@pytest.mark.parametrize("layout", ["whole", "packed", "two"])
def test_what_a_state_adds_to_a_stretch_forward_and_backward(layout: str) -> None:
    """Outputs and the state behind are linear in the state before; the adjoint is the gradient by it."""
    arrays = dict(GATED.arrays)
    state = arrays.pop("initial_state")
    two = jnp.ones((BATCH, LENGTH), jnp.int32).at[1, 9:].set(2)
    ids = arrays["segment_ids"] = {"whole": None, "packed": arrays["segment_ids"], "two": two}[layout]

    def entered(state: Any) -> Any:
        return call("reference", 4, {**arrays, "initial_state": state})

    (o, final), pull = jax.vjp(entered, state)
    o_zero, left = entered(jnp.zeros_like(state))
    do, dfinal = (random_cotangents(x) for x in (o, final))
    if ids is not None:
        do = jnp.where((ids > 0)[..., None, None], do, jnp.nan)
    transition, left_found, reads = jax.jit(partial(gated_delta_rule_summary, chunk_size=4))(**arrays)
    assert_close(left_found, left, n=GATED.terms)
    assert_close(transition @ state + left, final, n=GATED.terms)
    assert_close(jnp.einsum("bthk,bhkv->bthv", reads, state) + o_zero, o, n=GATED.terms)
    back, read = gated_delta_rule_adjoint(transition, reads, do, segment_ids=ids)
    assert_close(back @ dfinal + read, pull((jnp.nan_to_num(do), dfinal))[0], n=GATED.grad_terms)


def test_no_state_passes_a_stretch_in_which_a_document_begins() -> None:
    arrays = {n: GATED.arrays[n] for n in ("q", "k", "v", "beta", "log_gate")}
    ids = np.ones((BATCH, LENGTH), np.int32)
    ids[1, 9:] = 2
    summary = jax.jit(partial(gated_delta_rule_summary, implementation="reference"))
    transition, _, reads = map(np.asarray, summary(**arrays, segment_ids=ids))
    assert np.any(transition[0])
    assert not np.any(transition[1])
    assert np.all(np.any(reads, (2, 3)) == (ids == 1))


def test_the_inverse_does_not_grow_where_powers_would() -> None:
    """Of ones on the diagonal and twos below: its entries are 1 and 2, the matrix's 32nd power is above 1e18."""
    lower = jnp.tril(jnp.full((1, 64, 64), 2.0), -1)
    signs = (-1.0) ** np.subtract.outer(np.arange(64), np.arange(64))
    exact = np.eye(64) + np.tril(2 * signs, -1)
    found, pull = jax.vjp(jax.jit(unit_lower_inverse), lower)
    np.testing.assert_array_equal(found[0], exact)
    g = np.random.default_rng(0).standard_normal((64, 64))
    expected = -np.tril(exact.T @ g @ exact.T, -1)
    assert_close(pull(jnp.asarray(g[None], jnp.float32))[0][0], expected, n=64 * 64)


@pytest.mark.slow(days=28, group="costly")
def test_memory_and_products_of_a_training_step() -> None:
    """No array [time, keys, values]; backward keeps the inputs; products take bf16 and sum in fp32.

    Only the products that invert a matrix are fp32.
    """
    length, width, chunk = 4096, 32, 32
    arrays = {n: jnp.zeros((1, length, 1, width), jnp.bfloat16) for n in ("q", "k", "v")}
    arrays |= {n: jnp.zeros((1, length, 1), jnp.float32) for n in ("beta", "log_gate")}
    op = partial(gated_delta_rule, chunk_size=chunk)
    step = training_step(op, arrays)
    assert largest(step) <= length * width * width // chunk
    narrow = [kinds for kinds in dots(step) if "bfloat16" in kinds]
    assert set(narrow) == {("bfloat16", "bfloat16", "float32")}
    levels, passes = 5, 2  # of the inverse, in the forward pass and when backward repeats it
    assert len(dots(step)) - len(narrow) == 2 * levels * passes + 2
    given = sum(x.nbytes for x in arrays.values())
    assert given <= kept_bytes(op, arrays) <= given + 16 * width * width


def long_arrays(
    length: int, heads: int = 1, width: int = 8, *, decay: tuple[int, int] = (-9, 0), most: float = 1.0
) -> dict[str, Any]:
    """A row of bf16 streams with keys of length 1, beta up to `most`, and gates of -e^u with u of `decay`."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((1, length, heads, width)) for n in ("q", "k", "v")}
    arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    streams = {n: jnp.asarray(x, jnp.bfloat16) for n, x in arrays.items()}
    beta = jnp.asarray(rng.uniform(0, most, (1, length, heads)), jnp.float32)
    gates = jnp.asarray(rng.uniform(*decay, (1, length, heads)), jnp.float32)
    return streams | {"beta": beta, "log_gate": -jnp.exp(gates)}


@pytest.mark.slow(days=28, group="memories and states")
def test_over_65_539_steps_in_bf16() -> None:
    """Values and gradients against other chunks in fp32, and the last steps against one step after another."""
    arrays = long_arrays(65_539)
    o, _ = check_long(partial(call, "xla", 64), partial(call, "xla", 32), arrays)
    # Whatever lies 2,000 steps back has decayed to nothing.
    last = {n: x[:, -2000:].astype(jnp.float32) for n, x in arrays.items()}
    expected = gated_delta_rule(**last, implementation="reference")
    assert relative_rms(o[:, -100:], expected[:, -100:]) <= 0.005


@pytest.mark.slow(days=28, group="memories and states")
def test_over_4_096_steps_in_fp32() -> None:
    check_as_the_loop(partial(call, "xla", 32), partial(call, "reference", 32), long_arrays(4096))


@pytest.mark.slow(days=28, group="long")
def test_values_and_gradients_are_finite_over_a_million_steps() -> None:
    """From hardly any decay to one that leaves e^-20, with beta up to 2 and keys of length 1."""
    check_finite(partial(call, "xla", 64), long_arrays(1 << 20, width=2, decay=(-14, 3), most=2.0))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("length", [65_536, 131_075])
@pytest.mark.parametrize("implementation", ["xla", pytest.param("jla", marks=needs_jla)])
def test_long_rows_on_a_gpu(implementation: str, length: int) -> None:
    with as_others_write():
        run = partial(call, implementation, 64)
        check_long(run, partial(call, "xla", 32), long_arrays(length, 2, 128))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("implementation", ["xla", pytest.param("jla", marks=needs_jla)])
def test_a_million_steps_on_a_gpu(implementation: str) -> None:
    with as_others_write():
        check_finite(
            partial(call, implementation, 64), long_arrays(1 << 20, 1, 128, decay=(-14, 3), most=2.0)
        )


@pytest.mark.slow(days=28, group="properties of kernels")
def test_f64_stays_f64() -> None:
    with jax.enable_x64(True):
        arrays = {n: x if n == "segment_ids" else np.asarray(x, np.float64) for n, x in GATED.arrays.items()}
        found, expected = (jax.jit(partial(call, name, 4))(arrays) for name in ("xla", "reference"))
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == np.float64
            assert_close(got, want, np.float64, GATED.terms)


def test_the_reference_has_second_derivatives() -> None:
    arrays = {n: x for n, x in GATED.arrays.items() if n != "segment_ids"}
    total = lambda x: gated_delta_rule(**x, implementation="reference").sum()  # noqa: E731
    norm = lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(total)(x)))  # noqa: E731
    found = jax.eval_shape(jax.grad(norm), arrays)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": jnp.ones((2, 6, 1))}, r"beta must have shape \(2, 6, 2\)"),
        ({"beta": jnp.ones((2, 6, 2), jnp.int32)}, "beta must be floating point"),
        ({"log_gate": jnp.ones((2, 6))}, "log_gate must have shape"),
        ({"initial_state": jnp.ones((2, 2, 2, 3))}, r"initial_state must have shape \(2, 2, 3, 2\)"),
        ({"segment_ids": jnp.ones((2, 5), jnp.int32)}, "segment_ids must have shape"),
        ({"chunk_size": 0}, "power of two"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {"q": jnp.ones((2, 6, 1, 3)), "k": jnp.ones((2, 6, 1, 3)), "v": jnp.ones((2, 6, 2, 2))}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**given, "beta": jnp.ones((2, 6, 2)), **change})


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    shape = DeltaRuleShape("tiny", 1, 16, 1, 1, 2, 2)
    assert set(check(bench.plan(shape, chunk_size=4), jax.random.key(0))) == {"plain", "xla"}
