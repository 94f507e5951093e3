"""Documents, gates and products that ops with a matrix of state share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._linear_state.chunks import fit_chunk, into_chunks, out_of_chunks
from pallas_kernels._linear_state.decays import pair_decays, sum_gates
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import count_documents
from tests.tolerances import assert_close


def test_documents_are_counted_from_the_rows_first() -> None:
    ids = [[0, 0, 3, -3, 0, 3, 5, 5, 0, -9, 9], [7, 7, -7, 7, 8, 7, 7, 7, 7, 0, 0], [0] * 11]
    expected = [[0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [0] * 11]
    np.testing.assert_array_equal(count_documents(jnp.asarray(ids, jnp.int32)), expected)


@pytest.mark.parametrize("length", [1, 5, 8, 13])
def test_chunks_are_put_together_again(length: int) -> None:
    x = jnp.arange(2.0 * length * 3 * 2).reshape(2, length, 3, 2)
    chunk = fit_chunk(length, 4)
    chunks = into_chunks(x, chunk)
    assert chunks.shape == (-(-length // chunk), 2, 3, chunk, 2)
    np.testing.assert_array_equal(out_of_chunks(chunks, length), x)


@pytest.mark.slow(days=28, group="costly")
def test_small_gates_between_large_ones_keep_their_digits() -> None:
    """A difference of sums from the chunk's start would be off by 1e-4 here."""
    gates = np.tile([-3000.0, -1e-3, -2e-3, -1e-4], 16).astype(np.float32)
    chunk = jnp.asarray(gates).reshape(1, 1, 1, 64, 1)
    found = jax.jit(lambda g: pair_decays(sum_gates(g)))(chunk)[0, 0, 0, 0]
    exact = np.asarray(gates, np.float64)
    for i in range(64):
        for j in range(i + 1):
            expected = np.exp(exact[j + 1 : i + 1].sum())
            assert abs(float(found[i, j]) - expected) <= 1e-6 * expected + 1e-30


def test_a_product_is_narrow_both_ways_and_sums_wide() -> None:
    """1 + 2^-9 is no bf16 number; 256 + 1 = 256 in bf16."""
    ones = jnp.ones((1, 300))
    odd = ones + 2.0**-9
    out, pull = jax.vjp(lambda a, b: product("ik,jk->ij", a, b, jnp.bfloat16), odd, ones)
    np.testing.assert_array_equal(out, [[300.0]])
    da, db = pull(jnp.full((1, 1), 1 + 2.0**-9))
    np.testing.assert_array_equal(da, ones)
    np.testing.assert_array_equal(db, ones)
    assert_close(product("ik,jk->ij", odd, ones, jnp.float32), [[300 * (1 + 2.0**-9)]], n=300)
