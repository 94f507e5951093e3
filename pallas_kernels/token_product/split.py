"""Into how many parts the rows of one token's matrices are split, and the tiles of a program."""

from collections.abc import Sequence
from typing import NamedTuple

PROGRAMS = 264
"""Programs that a launch should have: two on each of the 132 multiprocessors of an H200."""

WIDE = 2048
"""Columns of a single matrix from which a program takes 128 of them."""

MOST_PARTS = 8
"""Most parts, as the next product reads them all."""


class Tile(NamedTuple):
    """Rows and columns of a matrix that are loaded at a time, how many loads are under way, and a program's warps."""

    rows: int = 128
    columns: int = 64
    loads: int = 4
    warps: int = 4


class Split(NamedTuple):
    """Parts of the rows of a matrix, and rows of a part: a multiple of a tile's."""

    parts: int
    rows: int


def choose_tile(dim: int, widths: Sequence[int]) -> Tile:
    """Return the tile of matrices of `dim` rows and these columns: the fastest on an H200 (`tune.py`).

    A matrix that narrows has a gate before it, which every program reads along its rows. A square one has attention.
    """
    columns = sum(widths)
    if columns > dim:
        return Tile() if dim < WIDE else Tile(128, 64, 2, 8)
    if columns < dim:
        return Tile(64, 64, loads=8) if columns < WIDE else Tile(64, 128)
    return Tile(warps=2) if columns < WIDE else Tile(columns=128)


def split_rows(dim: int, widths: Sequence[int]) -> Split:
    """Return the split of matrices of `dim` rows and these columns."""
    return cut_rows(dim, widths, choose_tile(dim, widths), PROGRAMS)


def cut_rows(dim: int, widths: Sequence[int], tile: Tile, programs: int) -> Split:
    """Return the least parts, of whole tiles, that make so many programs, or the most parts."""
    blocks, tiles = sum(-(-width // tile.columns) for width in widths), -(-dim // tile.rows)
    wanted = min(MOST_PARTS, -(-programs // blocks))
    each = -(-tiles // wanted)
    return Split(-(-tiles // each), each * tile.rows)
