"""Small arrays of one shape and dtype become one, and come apart as they were."""

import jax
import numpy as np

from jaxblt.models.packed import SMALL, SMALL_COUNTS, pack_small


def test_a_tree_is_packed_and_taken_apart():
    counts = [np.arange(3, dtype=np.int32) + i for i in range(4)]
    large, times = np.ones((3, SMALL), np.int8), np.ones((1, SMALL_COUNTS), np.int32)
    tree = {
        "a": counts[0],
        "b": (large, counts[1], np.float32([1, 2, 3])),
        "c": [counts[2], large, counts[3]],
        "caches": [times, times],
    }
    packed = jax.jit(pack_small)(tree)
    shapes = [(1, SMALL_COUNTS)] * 2 + [(3,), (3, SMALL), (3, SMALL), (4, 3)]
    assert sorted(array.shape for array in packed.arrays) == shapes
    found = packed.unpack()
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
