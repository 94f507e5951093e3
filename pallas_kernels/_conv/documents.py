"""Packed rows as the Hopper kernels know them, made by XLA once for all channels: a byte a step, a few a chunk.

A chunk of 64 steps may hold many documents, counted from 0. The state that enters a chunk is that of document 0, if
this lies across the chunk's first edge. The state that a chunk leaves behind is that of its last document. What chunk
c' sends reaches chunk c if one document covers all chunks between them and both edges. These are at most `links` chunks
back, where the chunk right before c counts as 0; -1 if there is none.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels._hopper import CHUNK, ROWS

COLUMNS = 16
"""The number of equal columns of links. A kernel reads the first, and with this number it was timed."""

REACH = 127
"""Bits of `Marks.links` that count."""


class Marks(NamedTuple):
    """The marks of rows of N chunks in whole tiles. Of the bounds in each chunk a kernel makes masks of steps.

    Attributes:
      steps: 0 at tokens, -1 at holes and padding.
      links: links + 1, which beyond a tile is a tile, less 128 if the chunk holds one document; see
        `COLUMNS`.
      links_back: the same against time.
      passes: the most documents in a chunk of each tile.
      begins: the first step of the chunk's document of order 1 ... 64, 64 if there is none; then that of its last.
      ends: the same against time: where the document before the last one ends, and so on, 0 if there is none; then
        where the first one ends.
      holes: 1 for each tile that holds anything but tokens, else 0.
    """

    steps: Int[Array, "B N 64"]
    links: Int[Array, "B N 16"]
    links_back: Int[Array, "B N 16"]
    passes: Int[Array, "B tiles"]
    begins: Int[Array, "B 65 N"]
    ends: Int[Array, "B 65 N"]
    holes: Int[Array, "B tiles"]


def mark(segment_ids: Int[Array, "B T"]) -> Marks:
    """Return the marks of packed rows; see `modal_conv` for `segment_ids`."""
    batch, length = segment_ids.shape
    ids = jnp.pad(segment_ids, ((0, 0), (0, -length % (CHUNK * ROWS)))).reshape(batch, -1, CHUNK)
    documents = jnp.abs(ids)
    new = (documents[..., 1:] != documents[..., :-1]).astype(jnp.int32)
    order = jnp.pad(jnp.cumsum(new, 2), ((0, 0), (0, 0), (1, 0)))
    last = order[..., -1:]
    across = documents[:, 1:, 0] == documents[:, :-1, -1]
    one = last[..., 0] == 0
    links = _links(jnp.pad(across, ((0, 0), (1, 0)), constant_values=True), one)
    back = _links(jnp.pad(across, ((0, 0), (0, 1)))[:, ::-1], one[:, ::-1])[:, ::-1]
    links, back = (jnp.broadcast_to(z[..., None], (*z.shape, COLUMNS)) for z in (links, back))
    begins, ends = _bounds(order)
    narrow = jnp.int8
    return Marks(
        steps=jnp.where(ids > 0, 0, -1).astype(narrow),
        links=links.astype(narrow),
        links_back=back.astype(narrow),
        passes=(1 + jnp.max(last.reshape(batch, -1, ROWS), 2)).astype(jnp.int32),
        begins=begins.astype(narrow),
        ends=ends.astype(narrow),
        holes=jnp.any((ids <= 0).reshape(batch, -1, ROWS * CHUNK), 2).astype(jnp.int32),
    )


def _bounds(order: Int[Array, "B N 64"]) -> tuple[Int[Array, "B 65 N"], Int[Array, "B 65 N"]]:
    """Return `Marks.begins` and `Marks.ends`, of each step's document in its chunk."""
    last, orders = order[..., -1:], 1 + jnp.arange(CHUNK)[None, None, :, None]
    begins = jnp.sum(order[..., None, :] < orders, -1)
    ends = jnp.sum((last - order)[..., None, :] >= orders, -1)
    begins, ends = (
        jnp.concatenate([one, other[..., :1]], -1).swapaxes(1, 2)
        for one, other in ((begins, ends), (ends, begins))
    )
    return begins, ends


def _links(across: Array, one: Array) -> Int[Array, "B N"]:
    """Return `Marks.links` of chunks in the order of the walk.

    `across`: a chunk's first document was there before it.
    """
    at = lax.broadcasted_iota(jnp.int32, one.shape, 1)
    # Find the latest chunk up to this one that hands nothing on; -1 before the row.
    cut = lax.cummax(jnp.where(across & one, -1, at), axis=1)
    before = jnp.pad(cut, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    links = jnp.where(across, jnp.minimum(at - before, ROWS), 0)
    return links - jnp.where(one, REACH + 1, 0)
