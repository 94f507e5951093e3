"""gated_delta_rule: beta up to 2, long keys, splits, the inverse, errors; test_state_ops has its suite."""

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
from tests.pallas_kernels.linear_state import (
    BATCH,
    KEYS,
)
from tests.pallas_kernels.op_suite import random_cotangents
from tests.pallas_kernels.state_ops import CASES, LENGTH, call, check_with
from tests.tolerances import assert_close

GATED = CASES["beta"]


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_replacing_nothing_all_or_twice(beta: float) -> None:
    """2 reflects the state at one key again and again, and nothing decays."""
    one_key = jnp.broadcast_to(GATED.arrays["k"][:, :1], GATED.arrays["k"].shape)
    change = {"beta": jnp.full_like(GATED.arrays["beta"], beta), "k": one_key}
    check_with(GATED, change | {"log_gate": jnp.zeros_like(GATED.arrays["log_gate"])})


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
    o, expected = (jax.jit(partial(call, "beta", name, 64))(arrays)[0] for name in ("xla", "reference"))
    assert_close(o, expected, n=64)


@pytest.mark.slow(days=28, group="costly")
def test_pieces_are_one_stream_and_their_summaries_join() -> None:
    # Slices of NumPy arrays are no programs
    given = {n: np.asarray(x) for n, x in GATED.arrays.items() if n != "segment_ids"}
    arrays = {n: x for n, x in given.items() if n != "initial_state"}
    state = given["initial_state"]
    run = jax.jit(partial(gated_delta_rule, output_final_state=True, chunk_size=4))
    summarise = jax.jit(partial(gated_delta_rule_summary, chunk_size=4))
    reference = jax.jit(partial(call, "beta", "reference", 4))
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
        return call("beta", "reference", 4, {**arrays, "initial_state": state})

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
