"""Packed rows as blocks of 512 steps of each channel, and which of its block's documents a step is of."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.packed import fit
from pallas_kernels._conv.toeplitz import toeplitz
from pallas_kernels._hopper import CHUNK, ROWS

CHUNKS = 8
"""Chunks of a block."""

BLOCK = CHUNKS * CHUNK


class Orders(NamedTuple):
    """The orders of documents in whole tiles of 64 blocks.

    Attributes:
      steps: documents of its block that began before a step's own.
      passes: the most documents in a block of each tile.
    """

    steps: Int[Array, "8 N 64"]
    passes: Int[Array, "tiles"]

    @classmethod
    def of(cls, documents: Int[Array, "B T"]) -> "Orders":
        """Return orders from |segment id|.

        What fills up a row is of its last document, a block beyond all rows of one.
        """
        filled = jnp.pad(documents, ((0, 0), (0, -documents.shape[1] % BLOCK)), mode="edge")
        filled = filled.reshape(-1, BLOCK)
        begins = (filled[:, 1:] != filled[:, :-1]).astype(jnp.int16)
        steps = jnp.cumsum(jnp.pad(begins, ((0, -filled.shape[0] % ROWS), (1, 0))), 1)
        passes = 1 + jnp.max(steps[:, -1].reshape(-1, ROWS), 1).astype(jnp.int32)
        return cls(jnp.moveaxis(steps.reshape(-1, CHUNKS, CHUNK), 1, 0), passes)


def as_blocks(z: Float[Array, "B D T"]) -> Float[Array, "D 8 N 64"]:
    """Lay rows one after another, chunk by chunk of blocks, filled to whole tiles of 64 blocks."""
    batch, channels, length = z.shape
    filled = fit(z, length + -length % BLOCK).reshape(batch, channels, -1, CHUNKS, CHUNK)
    blocks = jnp.transpose(filled, (1, 3, 0, 2, 4)).reshape(channels, CHUNKS, -1, CHUNK)
    return jnp.pad(blocks, ((0, 0), (0, 0), (0, -blocks.shape[2] % ROWS), (0, 0)))


def from_blocks(z: Float[Array, "D 8 N 64"], shape: tuple[int, ...]) -> Float[Array, "B D T"]:
    """Undo `as_blocks`; `shape` is [B, D, T]."""
    batch, channels, length = shape
    blocks = -(-length // BLOCK)
    own = z[:, :, : batch * blocks].reshape(channels, CHUNKS, batch, blocks, CHUNK)
    return fit(jnp.transpose(own, (2, 0, 3, 1, 4)).reshape(batch, channels, -1), length)


def block_weights(filter: Float[Array, "D F"]) -> Float[Array, "D 8 64 64"]:
    """Return W_l[i, j] = filter[64 l + i - j], zero outside of the filter."""
    return toeplitz(filter, BLOCK, CHUNK, 0).reshape(-1, CHUNKS, CHUNK, CHUNK)
