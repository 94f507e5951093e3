"""Places in documents, counted from the tokens themselves, on rows that a mesh may split."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxblt.mixers.driver.marks import Marks


@flax.struct.dataclass
class Counted:
    """Core of positions: each byte's offset in its document. The carry is the number of its bytes so far."""

    def zero(self, ids: Int[Array, "B T"]) -> Int[Array, "B"]:
        """Return a count of none."""
        return jnp.zeros(ids.shape[:1], jnp.int32)

    def run(
        self, ids: Int[Array, "B T"], marks: Marks, carry: Int[Array, "B"] | None
    ) -> tuple[Int[Array, "B T"], tuple[Int[Array, "B"], Bool[Array, "B"]]]:
        """Return offsets, and what the stretch adds to the count.

        A flag says that it begins another document's count.
        """
        index = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
        if marks.new is None:
            count = jnp.full(ids.shape[:1], ids.shape[1], jnp.int32)
            return index if carry is None else index + carry[:, None], (count, jnp.ones(ids.shape[:1], bool))
        # Keep this maximum apart: joined with a sum that reads it, as in a routed adapter of patches, XLA does not
        # compile.
        start = jax.lax.optimization_barrier(jax.lax.cummax(jnp.where(marks.new, index, -1), axis=1))
        offset = jnp.where(start < 0, index, index - start)
        if carry is not None:
            offset = jnp.where(start < 0, offset + carry[:, None], offset)
        return offset, (index[:, -1] - jnp.maximum(start[:, -1], 0) + 1, start[:, -1] < 0)

    def join(self, carry: Int[Array, "B"], summary: tuple[Any, Any]) -> Int[Array, "B"]:
        """Return the count behind the stretch."""
        count, stays = summary
        return jnp.where(stays, carry, 0) + count
