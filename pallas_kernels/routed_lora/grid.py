"""The Hopper kernel's products, and the order of its outputs' tiles.

They go down a band of `BAND` tiles before they go on to its next column. Clusters then read about as many
rows of left as columns of right at a time, and most of both from the L2 cache.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.routed_lora.hopper import STEP

BAND = 8
"""Tiles of a band, 2,048 rows: beside 8 columns of 256 they are about as many as there are clusters."""


Side = Literal["left", "output"] | None
"""The arrays of tokens that have channels before tokens, if any."""


class Term(NamedTuple):
    """A product of two of the arrays.

    Attributes:
      left, right: which arrays.
      start: channels of left that come before the first.
      size: channels of left from there on, all rows (columns, of a transposed one) of right.
    """

    left: int
    right: int
    start: int
    size: int


class Grid(NamedTuple):
    """The static part of a program.

    Attributes:
      terms: of each output.
      rows: tiles from top to bottom.
      columns: of each output, tiles from left to right.
      transposed: right arrays are [N, K].
      each: tiles from top to bottom of each row of tokens; their last one may be shorter than others.
      channels_first: whether those on the left or the outputs have channels before tokens.
      skips: an output's last term has the steps that `Steps` lists.
    """

    terms: tuple[tuple[Term, ...], ...]
    rows: int
    columns: tuple[int, ...]
    transposed: bool
    each: int
    channels_first: Side
    skips: bool = False

    def steps(self) -> list[int]:
        """Return the steps of a tile of each output, without those that are listed."""
        return [sum(term.size // STEP for term in terms[: len(terms) - self.skips]) for terms in self.terms]

    def firsts(self) -> list[int]:
        """Return where the list of each output begins."""
        sizes = [terms[-1].size // STEP for terms in self.terms]
        return [sum(sizes[:i]) for i in range(len(sizes))]

    def ends(self) -> list[int]:
        """Return the tiles up to the last one of each output."""
        return [self.rows * sum(self.columns[: i + 1]) for i in range(len(self.columns))]


class Place(NamedTuple):
    """The place of a tile: which output, and the tile's row and column there."""

    output: Int[Array, ""]
    row: Int[Array, ""]
    column: Int[Array, ""]


def place_of(grid: Grid, tile: Int[Array, ""]) -> Place:
    """Return the place of a tile, counted output by output, band by band, column by column."""
    ends = grid.ends()
    output = sum(((tile >= end).astype(jnp.int32) for end in ends[:-1]), jnp.int32(0))
    tile = tile - pick([0, *ends[:-1]], output)
    whole = BAND * pick(grid.columns, output)
    band, tile = tile // whole, tile % whole
    rows = jnp.minimum(BAND, grid.rows - band * BAND)
    return Place(output, band * BAND + tile % rows, tile // rows)


def pick(numbers: Sequence[int], output: Int[Array, ""]) -> Int[Array, ""]:
    """Return the number of this output."""
    found = jnp.int32(numbers[0])
    for i, number in enumerate(numbers[1:], start=1):
        found = jnp.where(output == i, jnp.int32(number), found)
    return found
