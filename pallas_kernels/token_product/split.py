"""Into how many parts the rows of one token's matrices are split."""

from collections.abc import Sequence
from typing import NamedTuple

COLUMNS, ROWS = 64, 128
"""Columns and rows of a tile."""

PROGRAMS = 160
"""Programs that a launch should have: an H200 has 132 multiprocessors."""

MOST_PARTS = 8
"""Most parts, as the next product reads them all."""


class Split(NamedTuple):
    """Parts of the rows of a matrix, and rows of a part: a multiple of a tile's."""

    parts: int
    rows: int


def split_rows(dim: int, widths: Sequence[int]) -> Split:
    """Return the split of matrices of `dim` rows and these columns."""
    blocks, tiles = sum(-(-width // COLUMNS) for width in widths), -(-dim // ROWS)
    wanted = min(MOST_PARTS, -(-PROGRAMS // blocks))
    each = -(-tiles // wanted)
    return Split(-(-tiles // each), each * ROWS)
