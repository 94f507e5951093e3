"""Holes, padding and documents, as ops with a matrix of state see them.

Where there is no token all inputs are zero: nothing is written, a log gate of zero keeps the state, and the output is
zero. Its cotangent is made zero too, as NaN may lie there. What is left to know of documents is which positions lie in
the same one.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped


def only_tokens(x: Float[Array, "B T ..."], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B T ..."]:
    """Zero x, in value and in gradient, at holes and padding, whatever lies there."""
    if segment_ids is None:
        return x
    token = (segment_ids > 0).reshape(*segment_ids.shape, *(1,) * (x.ndim - 2))
    return jnp.where(token, x, jnp.zeros((), x.dtype))


def count_documents(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Count the documents that began in a row up to each position, without its first.

    Padding counts to the document before it. The first document of a row is the one that its initial state is of.
    """
    document = jnp.abs(segment_ids)
    places = jnp.arange(document.shape[1], dtype=jnp.int32)[None]
    latest = lax.cummax(jnp.where(document != 0, places, -1), axis=1)
    earlier = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.take_along_axis(document, jnp.maximum(earlier, 0), 1)
    return jnp.cumsum((document != 0) & (earlier >= 0) & (document != before), 1, dtype=jnp.int32)


@dataclass(frozen=True)
class Documents:
    """The pairs of a chunk's positions that share a document; `numbers` None if all positions are of one."""

    numbers: Int[Array, "N B C"] | None

    def within(self, x: Float[Array, "N B *heads C C"]) -> Float[Array, "N B *heads C C"]:
        """Return x[i, j], zero unless j is at or before i and in i's document."""
        seen = jnp.tri(x.shape[-1], dtype=bool)[None, None]
        if self.numbers is not None:
            seen = seen & (self.numbers[..., :, None] == self.numbers[..., None, :])
        return _keep(seen.reshape(*seen.shape[:2], *(1,) * (x.ndim - 4), *seen.shape[2:]), x)

    def reading(self, x: Float[Array, "N B H C ..."]) -> Float[Array, "N B H C ..."]:
        """Zero x where a document began in the chunk: the state that enters is of another."""
        if self.numbers is None:
            return x
        return _keep(_beside_heads(self.numbers == self._entering[..., None], x), x)

    def writing(self, x: Float[Array, "N B H C ..."]) -> Float[Array, "N B H C ..."]:
        """Zero x where the document ends in the chunk: the state that leaves is of another."""
        if self.numbers is None:
            return x
        return _keep(_beside_heads(self.numbers == self.numbers[..., -1:], x), x)

    def carrying(self, x: Float[Array, "N B ..."]) -> Float[Array, "N B ..."]:
        """Zero x for chunks in which a document begins: no state goes through them."""
        if self.numbers is None:
            return x
        stays = self.numbers[..., -1] == self._entering
        return _keep(stays.reshape(*stays.shape, *(1,) * (x.ndim - 2)), x)

    @property
    def _entering(self) -> Int[Array, "N B"]:
        """The document of the state before each chunk."""
        assert self.numbers is not None
        return jnp.pad(self.numbers[:-1, :, -1], ((1, 0), (0, 0)))


def _beside_heads(mask: Bool[Array, "N B C"], x: Shaped[Array, "N B H C ..."]) -> Bool[Array, "N B 1 C ..."]:
    return mask[:, :, None].reshape(*mask.shape[:2], 1, mask.shape[2], *(1,) * (x.ndim - 4))


def _keep(mask: Bool[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.where(mask, x, jnp.zeros((), x.dtype))
