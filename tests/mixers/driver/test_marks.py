"""Marks of a stretch by hand: padding first, a document that goes on, a hole first, and nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.marks import mark

IDS = np.array([[0, 0, 2, 2, -2], [1, -1, 2, 0, 0], [-3, 3, 3, 0, 0], [0, 0, 0, 0, 0]], np.int32)
PAST = np.array([1, 1, 4, 1], np.int32)


def test_rows_begin_take_and_end_at_their_first_and_last_token_or_hole() -> None:
    marks = jax.jit(mark)(jnp.asarray(IDS), jnp.asarray(PAST))
    np.testing.assert_array_equal(
        marks.new, [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(marks.begins, [1, 0, 1, 0])
    np.testing.assert_array_equal(marks.takes, [1, 1, 1, 0])
    np.testing.assert_array_equal(marks.stays, [0, 0, 0, 1])
    np.testing.assert_array_equal(marks.end, [5, 3, 3, 0])


def test_factors_are_one_without_a_token_and_zero_where_a_document_begins() -> None:
    marks = jax.jit(mark)(jnp.asarray(IDS), jnp.asarray(PAST))
    half = jnp.full(IDS.shape, 0.5)
    found = np.asarray(jax.jit(marks.resets)(half))
    expected = [[1, 1, 0, 0.5, 1], [0.5, 1, 0, 1, 1], [0, 0.5, 0.5, 1, 1], [1] * 5]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(marks.inputs(half), np.where(IDS > 0, 0.5, 0))
