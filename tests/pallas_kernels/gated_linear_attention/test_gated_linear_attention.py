"""gated_linear_attention: summaries, adjoints, splits, errors; test_state_ops has its suite."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.gated_linear_attention import (
    bench,
    gated_linear_attention,
    gated_linear_attention_adjoint,
    gated_linear_attention_summary,
)
from pallas_kernels.gated_linear_attention.shapes import LinearAttentionShape
from tests.pallas_kernels.linear_state import (
    BATCH,
    HEADS,
    KEYS,
    VALUES,
)
from tests.pallas_kernels.op_suite import random_cotangents, value_and_grads
from tests.pallas_kernels.state_ops import CASES, GATES, LENGTH, call
from tests.tolerances import assert_close


@pytest.mark.slow(days=28, group="properties of kernels", every="log_key_gate")
@pytest.mark.parametrize("gate", GATES)
def test_pieces_are_one_stream_and_their_summaries_join(gate: str) -> None:
    # Slices of NumPy arrays are no programs
    arrays = {n: np.asarray(x) for n, x in CASES[gate].arrays.items() if n != "segment_ids"}
    state = arrays.pop("initial_state")
    run = jax.jit(partial(gated_linear_attention, output_final_state=True, chunk_size=4))
    summarise = jax.jit(gated_linear_attention_summary)
    whole, final = jax.jit(CASES[gate].run)({**arrays, "initial_state": state})
    found, joined = [], state
    for start in (0, 7, 14):
        piece = {n: x[:, start : start + 7] for n, x in arrays.items()}
        decay, left = summarise(**{n: x for n, x in piece.items() if n != "q"})
        joined = np.asarray(decay) * joined + left
        o, state = run(**piece, initial_state=state)
        found.append(o)
        assert_close(joined, state, n=LENGTH)
    assert_close(np.concatenate(found, 1), whole, n=LENGTH)
    assert_close(state, final, n=LENGTH)


@pytest.mark.slow(
    days=28, group="costly", turn="pallas_kernels/gated_linear_attention/test_gated_linear_attention"
)
@pytest.mark.parametrize("gate", GATES)
def test_a_summary_is_what_the_loop_leaves_forward_and_backward(gate: str) -> None:
    """Behind documents and holes, with one gate that forgets everything."""
    arrays = {n: x for n, x in CASES[gate].arrays.items() if n not in ("q", "initial_state")}
    ids = arrays.pop("segment_ids")
    arrays[gate] = arrays[gate].at[0, LENGTH - 6, 0].set(-jnp.inf)

    def summed(rows: Any) -> Any:
        return gated_linear_attention_summary(**rows, segment_ids=ids)[1]

    def looped(rows: Any) -> Any:
        options: dict[str, Any] = {"segment_ids": ids, "implementation": "reference"}
        return gated_linear_attention(rows["k"], **rows, **options, output_final_state=True)[1]

    found, expected = value_and_grads(summed, arrays), value_and_grads(looped, arrays)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(got, want, n=CASES[gate].grad_terms)


@pytest.mark.slow(
    days=28, group="costly", turn="pallas_kernels/gated_linear_attention/test_gated_linear_attention"
)
@pytest.mark.parametrize("gate", GATES)
def test_the_adjoint_is_the_gradient_by_the_state_before_a_stretch(gate: str) -> None:
    arrays = dict(CASES[gate].arrays)
    state = arrays.pop("initial_state")
    for ids in (None, arrays["segment_ids"], jnp.ones((BATCH, LENGTH), jnp.int32).at[1, 9:].set(2)):
        given = arrays | {"segment_ids": ids}

        def run(state: Any, given: Any = given) -> Any:
            return call(gate, "reference", 4, {**given, "initial_state": state})

        (o, final), pull = jax.vjp(run, state)
        do, dfinal = (random_cotangents(x) for x in (o, final))
        streams = {n: x for n, x in given.items() if n not in ("k", "v")}
        decay, read = jax.jit(partial(gated_linear_attention_adjoint, do=do))(**streams)
        assert_close(decay * dfinal + read, pull((do, dfinal))[0], n=CASES[gate].grad_terms)


def test_no_state_passes_a_stretch_in_which_a_document_begins() -> None:
    arrays = {n: CASES["log_gate"].arrays[n] for n in ("k", "v", "log_gate")}
    ids = np.ones((BATCH, LENGTH), np.int32)
    ids[1, 9:] = 2
    decay, left = jax.tree.map(np.asarray, jax.jit(gated_linear_attention_summary)(**arrays, segment_ids=ids))
    assert np.all(decay[0] > 0)
    assert not np.any(decay[1])
    assert left.shape == (BATCH, HEADS, KEYS, VALUES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.ones((2, 6, 1, 4))}, r"q and k must have one shape, got \(2, 6, 1, 4\)"),
        ({"v": jnp.ones((2, 6, 2, 2), jnp.bfloat16)}, "q, k and v must have one dtype"),
        ({"v": jnp.ones((2, 5, 2, 2))}, "v must have the batch and time of k"),
        ({"k": jnp.ones((2, 6, 3))}, "k must be"),
        ({"log_gate": jnp.ones((2, 6, 1))}, r"log_gate must have shape \(2, 6, 2\)"),
        ({"log_gate": jnp.ones((2, 6, 2)), "log_key_gate": jnp.ones((2, 6, 1, 3))}, "at most one gate"),
        ({"log_value_gate": jnp.ones((2, 6, 2, 2), jnp.int32)}, "log_value_gate must be floating point"),
        ({"initial_state": jnp.ones((2, 2, 2, 3))}, r"initial_state must have shape \(2, 2, 3, 2\)"),
        ({"segment_ids": jnp.ones((2, 6))}, "segment_ids must be integers"),
        ({"segment_ids": jnp.ones((2, 5), jnp.int32)}, "segment_ids must have shape"),
        ({"chunk_size": 48}, "power of two"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {"q": jnp.ones((2, 6, 1, 3)), "k": jnp.ones((2, 6, 1, 3)), "v": jnp.ones((2, 6, 2, 2))}
    with pytest.raises(ValueError, match=message):
        gated_linear_attention(**{**given, **change})


def test_key_heads_divide_value_heads() -> None:
    x = jnp.ones((1, 4, 2, 3))
    with pytest.raises(ValueError, match="heads of v must be a multiple of those of k, 2, got 3"):
        gated_linear_attention(x, x, jnp.ones((1, 4, 3, 3)))


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    shape = LinearAttentionShape("tiny", 1, 16, 1, 1, 2, 2, "head")
    assert set(check(bench.plan(shape, chunk_size=4), jax.random.key(0))) == {"plain", "xla"}


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_of_one_step_passes_its_gate() -> None:
    plan = bench.plan(LinearAttentionShape("tiny", 2, 1, 2, 1, 2, 4, "key"))
    assert set(check(plan, jax.random.key(0))) == {"xla", "reference"}
    assert plan.work["forward"].bytes_moved >= 2 * 4 * (2 * 2 * 2 * 4)
