"""Exact search against brute force, with ties, own documents, empty places and fewer vectors than neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters.retrieval import nearest
from jaxblt.adapters.retrieval.search import TILE

QUERIES, VECTORS, WIDTH = 5, 50, 3


def whole_numbers(seed):
    """Vectors whose products are exact and often equal; some of them are zero, which is an empty place."""
    rng = np.random.default_rng(seed)
    return (
        rng.integers(-2, 3, (QUERIES, WIDTH)),
        rng.integers(-2, 3, (VECTORS, WIDTH)),
        rng.integers(1, 6, VECTORS),
    )


def brute_force(queries, vectors, k, owners=None, own=None):
    """All products, sorted: of equal ones the first comes first."""
    scores = (queries @ vectors.T).astype(np.float32)
    scores[:, ~vectors.any(1)] = -np.inf
    if own is not None:
        scores[own[:, None] == owners[None]] = -np.inf
    place = np.argsort(-scores, 1, kind="stable")[:, :k]
    return np.take_along_axis(scores, place, 1), place


@pytest.mark.parametrize(("k", "tile"), [(4, 7), (50, 16), (1, 1024)])
def test_the_search_is_brute_force(k, tile):
    queries, vectors, owners = whole_numbers(k)
    own = np.asarray([1, 2, 3, 9, 1])
    given = [jnp.asarray(x, jnp.float32) for x in (queries, vectors)]
    for told in ({}, {"owners": owners, "own": own}):
        found = nearest(*given, k, tile=tile, **{n: jnp.asarray(x, jnp.int32) for n, x in told.items()})
        scores, place = brute_force(queries, vectors, k, **told)
        np.testing.assert_array_equal(found.similar, scores)
        np.testing.assert_array_equal(found.present, np.isfinite(scores))
        np.testing.assert_array_equal(
            np.where(found.present, found.place, 0), np.where(np.isfinite(scores), place, 0)
        )
    assert not np.isfinite(scores).all() or k < VECTORS
    assert len(np.unique(scores[0])) < k or k == 1


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_search")
def test_fewer_vectors_than_neighbours():
    vectors = jnp.eye(3)[:2]
    found = nearest(jnp.eye(3)[:1], vectors, 4)
    np.testing.assert_array_equal(found.similar, [[1, 0, -np.inf, -np.inf]])
    np.testing.assert_array_equal(found.present, [[True, True, False, False]])
    mine = nearest(jnp.eye(3)[:1], vectors, 4, owners=jnp.asarray([7, 7]), own=jnp.asarray([7]))
    assert not mine.present.any()


def test_an_index_of_whole_tiles_is_not_copied():
    queries, vectors = (jax.ShapeDtypeStruct((n, 32), jnp.float32) for n in (4, 8 * TILE))
    planned = jax.jit(lambda q, v: nearest(q, v, 2)).lower(queries, vectors).compile().memory_analysis()
    assert planned.temp_size_in_bytes < planned.argument_size_in_bytes / 4


def test_what_is_refused():
    vectors = jnp.eye(3)
    with pytest.raises(ValueError, match="k = 2 of 0 vectors finds none: use at least 1 of both"):
        nearest(vectors, vectors[:0], 2)
    with pytest.raises(ValueError, match="k = 0 of 3 vectors"):
        nearest(vectors, vectors, 0)
    with pytest.raises(ValueError, match="and owners is None: give both or none"):
        nearest(vectors, vectors, 1, own=jnp.asarray([1, 2, 3]))
