"""How the queries and keys of the XLA form are cut into blocks, and which pairs of blocks meet."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.rules import Interval

CPU_BLOCK, BLOCK = 256, 512
"""Queries, and keys, in a block: what a CPU's cache holds, and what keeps an accelerator busy."""

SMALLEST_BLOCK = 64
"""Along a band: smaller blocks compute fewer hidden scores, in more steps."""

MOST_PAIRS = 1 << 17
"""Blocks grow with the sequence, so that the list of pairs stays short."""


@dataclass(frozen=True)
class Blocks:
    """A grid of blocks over T queries and S keys.

    Attributes:
      queries, keys: T and S.
      block_q, block_k: block sizes; the last block may be padded.
      interval: of keys around each query, as in the mask.
      by_index: whether positions are indices, so that pairs that cannot see each other are known beforehand.
    """

    queries: int
    keys: int
    block_q: int
    block_k: int
    interval: Interval
    by_index: bool

    @property
    def rows(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.keys // self.block_k)

    @property
    def pad_q(self) -> int:
        return self.rows * self.block_q - self.queries

    @property
    def pad_k(self) -> int:
        return self.columns * self.block_k - self.keys

    @property
    def alone(self) -> bool:
        """True if one block of queries meets one block of keys."""
        return self.rows == self.columns == 1

    def pairs(self) -> np.ndarray:
        """Return pairs (query block, key block) in which a query may see a key, row after row: int32 [pairs, 2]."""
        columns = np.arange(self.columns)
        band = [
            np.stack([np.full(high - low, row), columns[low:high]], 1)
            for row in range(self.rows)
            for low, high in [self._columns_of(row)]
        ]
        return np.concatenate(band).astype(np.int32)

    def count(self) -> int:
        return sum(high - low for low, high in map(self._columns_of, range(self.rows)))

    def _columns_of(self, row: int) -> tuple[int, int]:
        low, high = 0, self.keys
        if self.by_index:
            first, last = row * self.block_q, (row + 1) * self.block_q - 1
            low, high = self.interval.reach(first, last, self.keys)
        return low // self.block_k, -(-high // self.block_k)


def choose_blocks(
    queries: int,
    keys: int,
    *,
    interval: Interval,
    by_index: bool,
    size: int = BLOCK,
    grain: int | None = None,
) -> Blocks:
    """Return blocks of `size` at most: one if all fits, half a window if that is less; larger for millions.

    Blocks that a rule is made of, of `grain`, are not joined to larger ones.
    """
    size = size if grain is None else min(size, max(SMALLEST_BLOCK, grain))
    size_q = size_k = size
    window = interval.window
    if by_index and window is not None:
        size_q = size_k = min(size, max(SMALLEST_BLOCK, 1 << (window - 1).bit_length() >> 1))
    elif queries * keys <= size * size:
        size_q, size_k = queries, keys
    elif queries < size:
        # A few queries leave their share of the scores to the keys.
        size_k = size * size // queries

    def grid() -> Blocks:
        return Blocks(queries, keys, min(size_q, queries), min(size_k, keys), interval, by_index)

    while grid().count() > MOST_PAIRS:
        size_q, size_k = 2 * size_q, 2 * size_k
    return grid()


def cut_queries(x: Float[Array, "B T H K"], groups: int, blocks: Blocks) -> Float[Array, "n B G R q K"]:
    """Cut queries (or their outputs) by block, the heads by the group whose keys they share."""
    batch, _, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, blocks.pad_q), (0, 0), (0, 0)))
    x = x.reshape(batch, blocks.rows, blocks.block_q, groups, heads // groups, width)
    return x.transpose(1, 0, 3, 4, 2, 5)


def join_queries(x: Float[Array, "n B G R q K"], blocks: Blocks) -> Float[Array, "B T H K"]:
    """Undo `cut_queries`."""
    rows, batch, groups, repeats, size, width = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, rows * size, groups * repeats, width)
    return x[:, : blocks.queries]


def cut_keys(x: Float[Array, "B S G K"], blocks: Blocks) -> Float[Array, "m B G s K"]:
    """Cut keys or values by block."""
    batch, _, groups, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, blocks.pad_k), (0, 0), (0, 0)))
    return x.reshape(batch, blocks.columns, blocks.block_k, groups, width).transpose(1, 0, 3, 2, 4)


def join_keys(x: Float[Array, "m B G s K"], blocks: Blocks) -> Float[Array, "B S G K"]:
    """Undo `cut_keys`."""
    columns, batch, groups, size, width = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, columns * size, groups, width)[:, : blocks.keys]


def cut_rows(
    x: Float[Array, "B H T"], groups: int, blocks: Blocks, *, fill: float = 0.0
) -> Float[Array, "n B G R q"]:
    """Cut one number a query, by block, like `cut_queries`; the last is filled up with `fill`."""
    batch, heads, _ = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, blocks.pad_q)), constant_values=fill)
    x = x.reshape(batch, groups, heads // groups, blocks.rows, blocks.block_q)
    return x.transpose(3, 0, 1, 2, 4)


def join_rows(x: Float[Array, "n B G R q"], blocks: Blocks) -> Float[Array, "B H T"]:
    """Undo `cut_rows`."""
    rows, batch, groups, repeats, size = x.shape
    x = x.transpose(1, 2, 3, 0, 4).reshape(batch, groups * repeats, rows * size)
    return x[:, :, : blocks.queries]


def cut_lists(x: Int[Array, "B #G T c"], blocks: Blocks) -> Int[Array, "n B #G 1 q c"]:
    """Cut lists, one a query, by block; the last is filled up with -1."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, blocks.pad_q), (0, 0)), constant_values=-1)
    x = x.reshape(*x.shape[:2], 1, blocks.rows, blocks.block_q, x.shape[-1])
    return jnp.moveaxis(x, 3, 0)


def cut_marks(x: Shaped[Array, "B T"], size: int, pad: int, fill: int) -> Shaped[Array, "n B size"]:
    """Cut segments or positions by block of `size`, the last filled up with `fill`."""
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
    return x.reshape(x.shape[0], -1, size).swapaxes(0, 1)
