"""The last inputs behind a stretch by hand: over holes, document edges, and stretches shorter than the history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers.driver.history import joined, recent
from jaxblt.mixers.driver.marks import mark

BEFORE = np.array([[[7, 8, 9]]], np.float32)
"""The last inputs of document 1, which goes on or ends."""


@jax.jit
def behind(inputs: jax.Array, ids: jax.Array, before: jax.Array) -> jax.Array:
    return joined(before, recent(inputs, mark(ids, 1), 3))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, -1, 1, 1, 0], [0, 3, 4]),
        ([1, 1, 0, 0, 0], [9, 1, 2]),
        ([1, -1, 0, 0, 0], [9, 1, 0]),
        ([2, 2, 0, 0, 0], [0, 1, 2]),
        ([1, 2, 2, 0, 0], [0, 2, 3]),
        ([0, 0, 0, 0, 0], [7, 8, 9]),
    ],
)
def test_the_last_inputs_are_of_the_last_document(ids: list[int], expected: list[int]) -> None:
    inputs = jnp.arange(1, 6, dtype=jnp.float32)[None, None]
    found = behind(inputs, jnp.asarray([ids], jnp.int32), jnp.asarray(BEFORE))
    np.testing.assert_array_equal(found[0, 0], expected)
