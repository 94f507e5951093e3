"""Hashed n-grams against a loop over bytes; sums of their rows against one-hot matmuls."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.hash_embedding import bench, hash_embedding, ngram_rows, reference, xla
from pallas_kernels.hash_embedding.shapes import HashShape
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close

SIZES, TABLE_SIZE, REACH = (3, 5), 101, 4
A = 0x9E3779B1
B, T, G, R, D = 8, 40, 3, 7, 5


def hashes(ids: Any, run: Any = None, history: Any = None, **options: Any) -> np.ndarray:
    options = {"sizes": SIZES, "table_size": TABLE_SIZE, **options}
    if history is None:
        history = np.zeros((len(ids), max(options["sizes"]) - 1), np.uint32)
    return np.asarray(jax.jit(partial(ngram_rows, **options))(ids, history, run))


def naive_row(grams: list[int], multiplier: int = A) -> int:
    total = sum(g * pow(multiplier, i, 2**32) for i, g in enumerate(reversed(grams))) % 2**32
    total = ((total ^ (total >> 16)) * 0x85EBCA6B) % 2**32
    total = ((total ^ (total >> 13)) * 0xC2B2AE35) % 2**32
    return (total ^ (total >> 16)) % TABLE_SIZE


def test_rows_equal_a_loop_over_bytes() -> None:
    ids = np.random.default_rng(0).integers(0, 260, (2, 19)).astype(np.int32)
    before = np.random.default_rng(1).integers(1, 261, (2, REACH)).astype(np.uint32)
    got = hashes(ids, history=jnp.asarray(before))
    for b in range(2):
        padded = [*map(int, before[b]), *(int(i) + 1 for i in ids[b])]
        for t in range(19):
            for g, n in enumerate(SIZES):
                assert got[b, t, g] == naive_row(padded[t + REACH - n + 1 : t + REACH + 1])


def test_ngrams_stop_at_the_document() -> None:
    ids = np.random.default_rng(1).integers(0, 260, (1, 12)).astype(np.int32)
    run = jnp.array([[0] * 5 + [1] * 7])
    np.testing.assert_array_equal(hashes(ids, run)[:, 5:], hashes(ids[:, 5:]))


def test_a_row_in_pieces_equals_the_row() -> None:
    """The bytes and documents before a chunk are all that it needs to know of them."""
    ids = np.random.default_rng(1).integers(0, 260, (2, 12)).astype(np.int32)
    documents = np.array([[7] * 5 + [8] * 7, [3] * 12], np.int32)
    whole = hashes(ids, jnp.asarray(documents))
    for cut in (4, 6, 9):
        before = slice(cut - REACH, cut)
        chunk = hashes(
            ids[:, cut:],
            jnp.asarray(documents[:, cut:]),
            jnp.asarray(ids[:, before] + 1, jnp.uint32),
            history_run=jnp.asarray(documents[:, before]),
        )
        np.testing.assert_array_equal(chunk, whole[:, cut:])


def test_every_function_has_a_hash_of_its_own() -> None:
    ids = np.random.default_rng(1).integers(0, 260, (1, 30)).astype(np.int32)
    got = hashes(ids, functions=6)[0, REACH:]
    np.testing.assert_array_equal(got[:, :2], hashes(ids)[0, REACH:])
    assert got[0, 8] == naive_row([int(i) + 1 for i in ids[0, 2:5]], A + 2)
    assert len({tuple(column) for column in got.T}) == 6 * len(SIZES)


def test_collisions_are_as_many_as_chance_makes() -> None:
    grams = size = 4000
    ids = np.random.default_rng(2).integers(0, 260, (grams, 8)).astype(np.int32)
    rows = hashes(ids, sizes=(8,), table_size=size)[:, -1, 0]
    expected = size * (1 - (1 - 1 / size) ** grams)
    deviation = np.sqrt(size * np.exp(-grams / size) * (1 - np.exp(-grams / size)))
    assert abs(len(set(rows.tolist())) - expected) < 4 * deviation


def arrays(dtype: Any) -> dict[str, Any]:
    """Rows of which some are read by most bytes and some by none."""
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.geometric(0.5, (B, T, G)) - 1, R - 2)
    return {
        "table": jax.device_put(rng.standard_normal((G * R, D)).astype(dtype)),
        "rows": jax.device_put(rows.astype(np.int32)),
    }


def _case(dtype: Any) -> op_suite.OpCase:
    return op_suite.OpCase(
        name=jnp.dtype(dtype).name,
        run=lambda a: xla.hash_embedding(a["table"], a["rows"]),
        reference=lambda a: reference.hash_embedding(a["table"], a["rows"]),
        arrays=arrays(dtype),
        shared=frozenset({"table"}),
        terms=G,
        grad_terms=B * T,
    )


CASES = [_case(dtype) for dtype in (jnp.float32, jnp.bfloat16)]


@pytest.mark.slow(days=28, group="properties of kernels", every="*-reference")
@pytest.mark.parametrize("check", [name for name in op_suite.CHECKS if name != "poison"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def test_gradients_of_half_precision_are_summed_wide() -> None:
    """In bf16 a sum of ones stands still at 256."""
    table, rows = jnp.zeros((2, 1)), jnp.zeros((1, 1000, 1), jnp.int32)
    run = partial(xla.hash_embedding, dtype=jnp.bfloat16)
    got = jax.grad(lambda t: run(t, rows).astype(jnp.float32).sum())(table)
    np.testing.assert_array_equal(got, [[1000.0], [0.0]])


def test_the_result_is_rounded_once() -> None:
    table = jnp.asarray([[1.0], [2.0**-8], [2.0**-8]])
    got = hash_embedding(table, jnp.zeros((1, 1, 3), jnp.int32), dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert_close(got, [[[1 + 2.0**-7]]], dtype=jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": jnp.ones((10, D))}, "a multiple of the number of tables"),
        ({"table": jnp.ones((9, D), jnp.int32)}, "a table of floats"),
        ({"rows": jnp.ones((2, 4, 3))}, "rows of integers"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hash_embedding(**{"table": jnp.ones((9, D)), "rows": jnp.ones((2, 4, 3), jnp.int32), **change})


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/hash_embedding/test_hash_embedding")
def test_a_short_history_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5-grams need the 4 bytes .* got a history of shape \(1, 2\)"):
        hashes(np.ones((1, 3), np.int32), history=jnp.zeros((1, 2), jnp.uint32))


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    errors = check(bench.plan(HashShape("tiny", 2, 64, 4, 11, (3, 4))), jax.random.key(0))
    assert set(errors) == {"plain", "xla"}
