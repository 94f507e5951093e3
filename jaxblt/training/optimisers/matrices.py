"""Arrays of more than two axes as matrices, so that XLA updates each of them in one pass."""

import math
from typing import Any

import jax
from jaxtyping import Array


def as_matrices(tree: Any) -> Any:
    """Return the tree with arrays of more than two axes as matrices; the others as they are.

    XLA fuses the update of an array with the sum for its norm only if both are matrices. It writes the update of
    [2048, 16, 128], reads it again and adds it in a second pass.
    """
    return jax.tree.map(lambda x: x.reshape(matrix_shape(x.shape)), tree)


def shaped_like(tree: Any, like: Any) -> Any:
    """Return the tree with the shapes of the arrays of another: the inverse of `as_matrices`."""
    return jax.tree.map(_shaped, tree, like)


def _shaped(x: Array, like: Array) -> Array:
    return x.reshape(like.shape)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the matrix nearest to a square that keeps the order of entries; one of two axes stays."""
    if len(shape) < 3 or 0 in shape:
        return shape
    sides = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(sides, key=lambda pair: max(pair) / min(pair))
