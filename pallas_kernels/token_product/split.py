"""Into how many parts the rows of one token's matrices are split, and the tiles of a program."""

from collections.abc import Sequence
from typing import NamedTuple

PROGRAMS = 160
"""Programs that a launch should have: an H200 has 132 multiprocessors."""

MOST_PARTS = 8
"""Most parts, as the next product reads them all."""


class Tile(NamedTuple):
    """What a program reads at a time: rows and columns of a matrix, in how many stages, and its warps."""

    rows: int = 128
    columns: int = 64
    stages: int = 4
    warps: int = 4


class Split(NamedTuple):
    """Parts of the rows of a matrix, and rows of a part: a multiple of a tile's."""

    parts: int
    rows: int


def choose_tile(dim: int, widths: Sequence[int]) -> Tile:
    """Return the tile of matrices of `dim` rows and these columns."""
    return Tile()


def split_rows(dim: int, widths: Sequence[int]) -> Split:
    """Return the split of matrices of `dim` rows and these columns."""
    return cut_rows(dim, widths, choose_tile(dim, widths), PROGRAMS)


def cut_rows(dim: int, widths: Sequence[int], tile: Tile, programs: int) -> Split:
    """Return the least parts, of whole tiles, that make so many programs, or the most parts."""
    blocks, tiles = sum(-(-width // tile.columns) for width in widths), -(-dim // tile.rows)
    wanted = min(MOST_PARTS, -(-programs // blocks))
    each = -(-tiles // wanted)
    return Split(-(-tiles // each), each * tile.rows)
