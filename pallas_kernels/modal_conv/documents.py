"""What the Hopper kernels know of packed rows, made by XLA once for all channels: a number a step, two a chunk.

A chunk of 64 steps may hold many documents. Counted from 0, step j is of the chunk's document `order[j]`. The state
that enters a chunk is that of document 0, if this lies across the chunk's first edge. The state that a chunk leaves
behind is that of its last document. What chunk c' sends reaches chunk c if one document covers all chunks between them
and both edges: that is `links` chunks back at most, the chunk right before c counted as 0; -1 if there is none.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels._hopper import CHUNK, ROWS
from pallas_kernels.modal_conv.hopper import MODES

LAST = CHUNK
"""Added to the order of the chunk's last document."""

REACH = 127
"""Bits of `Marks.links` that count."""


class Marks(NamedTuple):
    """Of rows of N chunks in whole tiles.

    Attributes:
      steps: a step's document in its chunk, plus `LAST` if it is the chunk's last; -1 at holes and padding.
      links: links + 1, which beyond a tile is a tile, less 128 if the chunk holds one document; one for each mode, as a
        kernel loads matrices.
      links_back: the same against time.
      passes: the most documents in a chunk of each tile.
    """

    steps: Int[Array, "B N 64"]
    links: Int[Array, "B N 16"]
    links_back: Int[Array, "B N 16"]
    passes: Int[Array, "B tiles"]


def mark(segment_ids: Int[Array, "B T"]) -> Marks:
    """The marks of packed rows; see `modal_conv` for `segment_ids`."""
    batch, length = segment_ids.shape
    filled = jnp.pad(segment_ids, ((0, 0), (0, -length % (CHUNK * ROWS))))
    ids = filled.reshape(batch, -1, CHUNK)
    documents = jnp.abs(ids)
    begins = (documents[..., 1:] != documents[..., :-1]).astype(jnp.int32)
    order = jnp.pad(jnp.cumsum(begins, 2), ((0, 0), (0, 0), (1, 0)))
    last = order[..., -1:]
    steps = jnp.where(ids > 0, order + jnp.where(order == last, LAST, 0), -1)
    across = documents[:, 1:, 0] == documents[:, :-1, -1]
    one = last[..., 0] == 0
    links = _links(jnp.pad(across, ((0, 0), (1, 0)), constant_values=True), one)
    back = _links(jnp.pad(across, ((0, 0), (0, 1)))[:, ::-1], one[:, ::-1])[:, ::-1]
    passes = 1 + jnp.max(last.reshape(batch, -1, ROWS), 2)
    links, back = (jnp.broadcast_to(z[..., None], (*z.shape, MODES)) for z in (links, back))
    narrow = jnp.int8
    return Marks(steps.astype(narrow), links.astype(narrow), back.astype(narrow), passes.astype(jnp.int32))


def _links(across: Array, one: Array) -> Int[Array, "B N"]:
    """`Marks.links` of chunks in the order of the walk; `across`: a chunk's first document was there before it."""
    at = lax.broadcasted_iota(jnp.int32, one.shape, 1)
    # The latest chunk up to this one that hands nothing on; -1 before the row.
    cut = lax.cummax(jnp.where(across & one, -1, at), axis=1)
    before = jnp.pad(cut, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    links = jnp.where(across, jnp.minimum(at - before, ROWS), 0)
    return links - jnp.where(one, REACH + 1, 0)
