"""Exact search of the most similar vectors, a tile of the index at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.runtime import vary_alike

TILE = 1024
"""Vectors that are compared at once: scores in memory are queries x tile, whatever the size of the index."""


class Found(NamedTuple):
    """Neighbours of each query, the most similar first; of equal ones the first in the index comes first.

    Attributes:
      similar: inner products; -inf where there are fewer than k neighbours.
      place: of each in the index; it means nothing where there is none.
      present: whether there is a neighbour.
    """

    similar: Float[Array, "Q K"]
    place: Int[Array, "Q K"]
    present: Bool[Array, "Q K"]


def nearest(
    queries: Float[Array, "Q D"],
    vectors: Float[Array, "N D"],
    k: int,
    *,
    owners: Int[Array, "N"] | None = None,
    own: Int[Array, "Q"] | None = None,
    tile: int = TILE,
) -> Found:
    """Return the k vectors with the largest inner products, found by comparing all of them in fp32.

    A vector of zeros is an empty place and no neighbour.

    Args:
      queries: what to look for.
      vectors: of the index.
      k: neighbours of a query, at least 1.
      owners: document that each vector belongs to.
      own: document of each query, none of whose vectors is its neighbour; None leaves nothing out.
      tile: vectors that are compared at once.

    Raises:
      ValueError: there is no vector, k is below 1, or one of owners and own is missing.
    """
    if not len(vectors) or k < 1:
        raise ValueError(f"a search for k = {k} of {len(vectors)} vectors finds none: use at least 1 of both")
    if (owners is None) != (own is None):
        missing = "own" if own is None else "owners"
        raise ValueError(
            f"owners and own leave documents out together, and {missing} is None: give both or none"
        )
    size = min(tile, len(vectors))
    owned = None if owners is None else _in_tiles(owners, size)
    places = _in_tiles(jnp.arange(len(vectors), dtype=jnp.int32), size)

    def compare(part: tuple[Array, Array | None, Array]) -> tuple[Array, Array]:
        there, owned, place = part
        score = jnp.einsum("qd,nd->qn", queries, there, precision=jax.lax.Precision.HIGHEST)
        allowed = jnp.any(there != 0, -1)[None]
        if own is not None and owned is not None:
            allowed = allowed & (owned[None] != own[:, None])
        return jnp.where(allowed, score, -jnp.inf), jnp.broadcast_to(place[None], score.shape)

    def keep(
        best: tuple[Array, Array], part: tuple[Array, Array | None, Array]
    ) -> tuple[tuple[Array, Array], None]:
        # top_k takes the first of equal scores, and what was kept came earlier in the index
        both = [jnp.concatenate(pair, -1) for pair in zip(best, compare(part), strict=True)]
        return _largest(both[0], both[1], k), None

    shape = (len(queries), k)
    nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    start = vary_alike(*nothing, queries, vectors, owners, own)[:2]
    best, _ = jax.lax.scan(keep, start, (_in_tiles(vectors, size), owned, places))
    return Found(*best, jnp.isfinite(best[0]))


def _in_tiles(x: Shaped[Array, "N ..."], size: int) -> Shaped[Array, "M N2 ..."]:
    """Return x in tiles of so many rows each; zeros fill the last one up."""
    whole = jnp.pad(x, ((0, -len(x) % size), *((0, 0),) * (x.ndim - 1)))
    return whole.reshape(-1, size, *x.shape[1:])


def _largest(score: Float[Array, "Q N"], place: Int[Array, "Q N"], k: int) -> tuple[Array, Array]:
    score, column = jax.lax.top_k(score, k)
    return score, jnp.take_along_axis(place, column, -1)
