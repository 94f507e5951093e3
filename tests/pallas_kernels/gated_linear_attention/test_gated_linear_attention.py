"""gated_linear_attention: the suite over gates, packed rows and states; strong decay, splits, memory, errors."""

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
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.linear_state import (
    BATCH,
    HEADS,
    KEY_HEADS,
    KEYS,
    VALUES,
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
GATES = {
    "log_gate": (HEADS,),
    "log_key_gate": (KEY_HEADS, KEYS),
    "log_value_gate": (HEADS, VALUES),
}


def call(implementation: Any, chunk_size: int, arrays: dict[str, Any]) -> Any:
    return gated_linear_attention(
        **arrays, output_final_state=True, chunk_size=chunk_size, implementation=implementation
    )


def case(
    gate: str | None,
    length: int = LENGTH,
    dtype: Any = jnp.float32,
    *,
    chunk_size: int = 4,
    batch: int = BATCH,
) -> OpCase:
    arrays = heads(length, dtype) | {"segment_ids": packed(length)}
    if gate is not None:
        arrays[gate] = log_gates(4, (BATCH, length, *GATES[gate]))
    arrays = {n: jax.device_put(np.concatenate([x] * (batch // BATCH))) for n, x in arrays.items()}
    return state_case(
        f"{gate}, {length} steps, {jnp.dtype(dtype).name}",
        partial(call, "xla", chunk_size),
        partial(call, "reference", chunk_size),
        arrays,
    )


CASES = {name: case(name) for name in GATES}
PAIRS = [
    *((each, "reference") for each in CASES.values()),
    (case(None, 1), "reference"),
    (case("log_key_gate", 19, jnp.bfloat16, chunk_size=8), "reference"),
    (CASES["log_gate"], "poison"),
    (CASES["log_value_gate"], "vmap"),
    (CASES["log_gate"], "shard_map"),
    (CASES["log_key_gate"], "remat"),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="log_*-float32-reference")
@pytest.mark.parametrize(("case", "check"), PAIRS, ids=lambda x: str(x).replace(", ", "-"))
def test_suite(case: OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("strong", [-50.0, -3000.0, -np.inf])
def test_strong_decay_is_exact_beside_weak_decay(gate: str, strong: float) -> None:
    """Reported of kernels that divide by exp of a sum: NaN, or gradients that are off."""
    given = CASES[gate]
    pattern = np.random.default_rng(9).uniform(size=given.arrays[gate].shape) < 0.4
    arrays = {**given.arrays, gate: jnp.where(pattern, strong, given.arrays[gate])}
    actual = value_and_grads(given.run, arrays)
    expected = reference_and_grads(given, arrays)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close(got, want, n=given.grad_terms)


@pytest.mark.parametrize("gate", GATES)
def test_rows_without_a_token_keep_their_state(gate: str) -> None:
    given = CASES[gate]
    ids = given.arrays["segment_ids"].at[0].set(0).at[1].set(-3)
    (o, final), _ = value_and_grads(given.run, {**given.arrays, "segment_ids": ids})
    np.testing.assert_array_equal(final, given.arrays["initial_state"])
    assert not np.any(o)


@pytest.mark.parametrize("gate", GATES)
def test_documents_are_computed_as_if_apart(gate: str) -> None:
    """A document in the middle gives what it gives alone, wherever it begins in a chunk."""
    given = CASES[gate]
    run = jax.jit(given.run)
    for start in (2, 5, 8):
        inside = (np.arange(LENGTH) >= start) & (np.arange(LENGTH) < start + 9)
        among = jnp.asarray(np.where(inside, 2, np.where(np.arange(LENGTH) < start, 1, 3))[None].repeat(2, 0))
        alone = jnp.asarray(np.where(inside, 2, 0)[None].repeat(2, 0))
        rows = given.arrays | {"initial_state": jnp.zeros_like(given.arrays["initial_state"])}
        packed_o, _ = run({**rows, "segment_ids": among.astype(jnp.int32)})
        alone_o, _ = run({**rows, "segment_ids": alone.astype(jnp.int32)})
        assert_close(packed_o[:, inside], alone_o[:, inside], n=given.terms)


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
            return call("reference", 4, {**given, "initial_state": state})

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


@pytest.mark.slow(days=28, group="properties of kernels", every="log_key_gate")
@pytest.mark.parametrize("gate", GATES)
def test_memory_and_products_of_a_training_step(gate: str) -> None:
    """No array [time, keys, values]; backward keeps the inputs; products take bf16 and sum in fp32."""
    length, width, chunk = 4096, 32, 32
    arrays = {n: jnp.zeros((1, length, 1, width), jnp.bfloat16) for n in ("q", "k", "v")}
    shape = (1, length, 1) if gate == "log_gate" else (1, length, 1, width)
    arrays[gate] = jnp.zeros(shape, jnp.float32)
    op = partial(gated_linear_attention, chunk_size=chunk, implementation="xla")
    step = training_step(op, arrays)
    assert largest(step) <= length * width * width // chunk
    assert set(dots(step)) == {("bfloat16", "bfloat16", "float32")}
    given = sum(x.nbytes for x in arrays.values())
    assert given <= kept_bytes(op, arrays) <= given + 16 * width * width


def long_arrays(
    gate: str, length: int, heads: int = 1, width: int = 2, decay: tuple[int, int] = (-9, 0)
) -> dict[str, Any]:
    """A row of bf16 streams, and gates of -e^u with u between the ends of `decay`."""
    rng, shape = np.random.default_rng(0), (1, length, heads, width)
    arrays = {n: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for n in ("q", "k", "v")}
    gates = rng.uniform(*decay, shape[:3] if gate == "log_gate" else shape)
    return arrays | {gate: -jnp.exp(jnp.asarray(gates, jnp.float32))}


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("gate", GATES)
def test_over_131_075_steps_in_bf16(gate: str) -> None:
    """Values and gradients against other chunks in fp32, and the last steps against one step after another."""
    arrays = long_arrays(gate, 131_075)
    o, _ = check_long(partial(call, "xla", 64), partial(call, "xla", 32), arrays)
    # Whatever lies 2,000 steps back has decayed to nothing.
    last = {n: x[:, -2000:].astype(jnp.float32) for n, x in arrays.items()}
    expected = gated_linear_attention(**last, implementation="reference")
    assert relative_rms(o[:, -100:], expected[:, -100:]) <= 0.005


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("gate", GATES)
def test_over_4_096_steps_in_fp32(gate: str) -> None:
    arrays = long_arrays(gate, 4096)
    check_as_the_loop(partial(call, "xla", 32), partial(call, "reference", 32), arrays)


@pytest.mark.slow(days=28, group="long")
@pytest.mark.parametrize("gate", GATES)
def test_values_and_gradients_are_finite_over_a_million_steps(gate: str) -> None:
    """From hardly any decay to one that leaves e^-20, in chunks of 64."""
    check_finite(partial(call, "xla", 64), long_arrays(gate, 1 << 20, decay=(-14, 3)))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("gate", ["log_key_gate"])
def test_f64_stays_f64(gate: str) -> None:
    with jax.enable_x64(True):
        arrays = {
            n: x if n == "segment_ids" else np.asarray(x, np.float64) for n, x in CASES[gate].arrays.items()
        }
        found, expected = (jax.jit(partial(call, name, 4))(arrays) for name in ("xla", "reference"))
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == np.float64
            assert_close(got, want, np.float64, CASES[gate].terms)


def test_the_reference_has_second_derivatives() -> None:
    arrays = {n: x for n, x in CASES["log_key_gate"].arrays.items() if n in ("q", "k", "v", "log_key_gate")}
    total = lambda x: gated_linear_attention(**x, implementation="reference").sum()  # noqa: E731
    norm = lambda x: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(total)(x)))  # noqa: E731
    found = jax.eval_shape(jax.grad(norm), arrays)
    assert jax.tree.map(lambda x: x.shape, found) == jax.tree.map(lambda x: x.shape, arrays)


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
