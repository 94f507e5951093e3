"""Into how many parts the rows of one token's matrices are split, and the tiles of a program."""

from collections.abc import Sequence
from typing import NamedTuple

MOST_PARTS = 8
"""Most parts, as programs of the next product read them."""

MOST_PARTS_BEHIND_A_GATE = 11
"""Most parts of a matrix that narrows, as one sum reads them."""


class Tile(NamedTuple):
    """Rows and columns of a matrix that are loaded at a time, how many loads are under way, and a program's warps."""

    rows: int = 128
    columns: int = 64
    loads: int = 2
    warps: int = 4


class Split(NamedTuple):
    """Parts of the rows of a matrix, and rows of a part: a multiple of a tile's."""

    parts: int
    rows: int


TILE = Tile()
"""The tile of every matrix: in the mean of the models' shapes the fastest on an H200 (`tune.py`)."""


def split_rows(dim: int, widths: Sequence[int]) -> Split:
    """Return the split of matrices of `dim` rows and these columns."""
    most = MOST_PARTS_BEHIND_A_GATE if sum(widths) < dim else MOST_PARTS
    return cut_rows(dim, TILE, most)


def cut_rows(dim: int, tile: Tile, most: int) -> Split:
    """Return as many parts of whole tiles as there may be."""
    tiles = -(-dim // tile.rows)
    each = -(-tiles // most)
    return Split(-(-tiles // each), each * tile.rows)
