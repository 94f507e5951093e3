"""Rows of any length where they lie: one behind another in memory, seen as chunks of 64 steps, without a copy.

Row r of T steps starts at step r T = 64 q + s, so that s steps of its first chunk q belong to the row before:

    chunk     q        q + 1      ...             q'       (q' and s' are those of row r + 1)
            [..|s.....][.........]    [.........][...s'|..]
                ^ row r                               ^ row r + 1

A kernel takes whole chunks. Of a row's two edges it takes the one that it meets last, with what the other row has there
as zeros. The edge that it would meet first is computed outside, and so is the state that it leaves behind: in the
direction of time that is chunk q, against it chunk q'. The kernel then writes each chunk once, as the other row's
results in the chunk are handed to it.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._hopper import CHUNK, ROWS


@dataclass(frozen=True)
class FlatRows:
    """Rows of `length` steps, walked through in the direction of time or against it (`reverse`)."""

    length: int
    reverse: bool = False

    @property
    def tiles(self) -> int:
        """Tiles of 64 chunks that hold any row; of some rows the last may be empty."""
        return -(-self.length // (CHUNK * ROWS))

    @property
    def ragged(self) -> bool:
        """True if any row begins within a chunk."""
        return self.length % CHUNK != 0

    def cut(self, row: Any) -> tuple[Any, Any]:
        """Return q and s of a row."""
        whole, rest = divmod(self.length, CHUNK)
        return row * whole + row * rest // CHUNK, row * rest % CHUNK

    def chunks(self, row: Any) -> tuple[Any, Any]:
        """Return the first chunk that a kernel takes of a row, and how many."""
        (first, s), (end, next_s) = self.cut(row), self.cut(row + 1)
        if not self.reverse:
            first, end = first + (s > 0).astype(jnp.int32), end + (next_s > 0).astype(jnp.int32)
        return first, end - first

    def own(self, row: Any, tile: Any) -> tuple[Any, Any]:
        """Return the steps of a tile, counted from its start, that are the row's.

        They go from the first number up to the second.
        """
        start = tile * (CHUNK * ROWS)
        (_, s), (_, count) = self.cut(row), self.chunks(row)
        if self.reverse:
            return s - start, count * CHUNK - start
        return jnp.zeros_like(start), self.length - (CHUNK - s) % CHUNK - start

    def is_shared(self, row: Any, tile: Any) -> Any:
        """Return whether a tile holds steps that are not the row's."""
        first, stop = self.own(row, tile)
        return (first > 0) | (stop < CHUNK * ROWS)

    def is_cut(self, row: Any, tile: Any) -> Any:
        """Return whether a row's chunks end before a tile does."""
        return self.entry(row, tile) < ROWS

    def entry(self, row: Any, tile: Any) -> Any:
        """Return the chunk of the row's last tile behind its last chunk, 64 if it fills the tile.

        In other tiles it is at least 64.
        """
        return self.chunks(row)[1] - tile * ROWS

    def neighbour(self, row: Any, rows: int) -> Any:
        """Return the row whose edge lies in the kernel's last chunk of this one, or the row itself."""
        return jnp.maximum(row - 1, 0) if self.reverse else jnp.minimum(row + 1, rows - 1)

    def edges(self, z: Float[Array, "M 64"], shape: tuple[int, ...]) -> Float[Array, "B D 64"]:
        """Return the chunk of each row that is left to the caller, zero where it is not the row's."""
        batch, channels, _ = shape
        q, own = self._edge(shape)
        found = z.at[q].get(mode="clip", indices_are_sorted=True)
        return jnp.where(own, found, jnp.zeros((), z.dtype)).reshape(batch, channels, CHUNK)

    def before_edges(
        self, z: Float[Array, "M 64"], shape: tuple[int, ...], count: int
    ) -> Float[Array, "B D steps"]:
        """Return the `count` chunks before `edges` in the direction of time.

        For rows that hold them and `reverse`.
        """
        q, _ = self._edge(shape)
        found = [z.at[q - k].get(mode="clip", indices_are_sorted=True) for k in range(count, 0, -1)]
        return jnp.concatenate(found, 1).reshape(*shape[:2], count * CHUNK)

    def edge_lengths(self, shape: tuple[int, ...]) -> Float[Array, "B D"]:
        """Return the steps of each row in the chunk that is left to the caller."""
        return self._edge(shape)[1].sum(1).astype(jnp.float32).reshape(shape[:2])

    def _edge(self, shape: tuple[int, ...]) -> tuple[Array, Bool[Array, "R 64"]]:
        rows = jnp.arange(shape[0] * shape[1], dtype=jnp.int32) + int(self.reverse)
        q, s = self.cut(rows)
        step = jnp.arange(CHUNK, dtype=jnp.int32)[None]
        own = step < s[:, None] if self.reverse else (step >= s[:, None]) & (s[:, None] > 0)
        return q, own


def flatten(z: Float[Array, "B D T"]) -> Float[Array, "M 64"]:
    """Lay rows out as chunks, one behind another.

    This copies only where B D T is no multiple of 64.
    """
    flat = z.reshape(-1)
    return jnp.pad(flat, (0, -flat.shape[0] % CHUNK)).reshape(-1, CHUNK)


def unflatten(z: Float[Array, "M 64"], shape: tuple[int, ...]) -> Float[Array, "B D T"]:
    """Undo `flatten`; `shape` is [B, D, T]."""
    batch, channels, length = shape
    return z.reshape(-1)[: batch * channels * length].reshape(shape)
