"""Answers that are the same for both strands of DNA by their form: a model reads each record on both.

With g a model and rc the reverse complement of a record, the answer of a row is f(x) = (g(x) + g(rc(x))) / 2, so that
f(rc(x)) = f(x) for any parameters. Of positions f is equivariant: the answer at a base is that at its partner.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.data.sources import reverse_complement
from jaxblt.data.vocab import OFFSET, encode
from jaxblt.models.label_head import content

COMPLEMENTS = np.r_[:OFFSET, encode(reverse_complement(bytes(range(256)))[::-1])].astype(np.int32)
"""The id of each id's complement; special ids, and bytes without a complement, are their own."""


def find_partners(ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> Int[Array, "B T"]:
    """Return the place of each base's partner if the record is read from its other end.

    Base k of n has base n - 1 - k. Padding, holes and special ids are their own partners.
    """
    there = content(ids, segment_ids)
    rank = jnp.cumsum(there, 1, dtype=jnp.int32) - 1
    places = jnp.argsort(~there, axis=1, stable=True)
    partner = jnp.take_along_axis(places, jnp.where(there, rank[:, -1:] - rank, 0), 1)
    return jnp.where(there, partner, jnp.arange(ids.shape[1])[None]).astype(jnp.int32)


def read_both(ids: Int[Array, "B T"], partners: Int[Array, "B T"]) -> Int[Array, "R T"]:
    """Return each row and, next to it, the row of its other strand.

    Rows of one record stay next to each other, so that devices that share rows have both.
    """
    other = jnp.asarray(COMPLEMENTS)[jnp.take_along_axis(ids, partners, 1)]
    return twice(ids).at[1::2].set(other)


def twice(x: Any) -> Any:
    """Return each row of an array two times, next to each other; None for None."""
    return None if x is None else jnp.repeat(x, 2, axis=0)


def mean_of_strands(said: Float[Array, "R *N"], partners: Int[Array, "B T"]) -> Float[Array, "B *N"]:
    """Return the mean of the answers to both strands, of rows [2B, C] or of places [2B, T, C]."""
    own, other = said[0::2], said[1::2]
    if said.ndim == 3:
        other = jnp.take_along_axis(other, partners[..., None], 1)
    return (own + other) / 2
