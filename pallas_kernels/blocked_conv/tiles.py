"""Parts that both Hopper kernels share: matrices of the filter, and tiles that start at any chunk of a buffer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._conv.tile_documents import TileDocuments
from pallas_kernels._conv.tiles import read
from pallas_kernels._conv.toeplitz import toeplitz
from pallas_kernels.blocked_conv.hopper import CHUNK, REACH, ROWS

DY, POST, X, PRE = range(4)
"""Names of the streams: in the backward kernel their places in a stage. That of a missing gate is not loaded."""

PITCH = CHUNK + 8
"""Elements per chunk in a shifted buffer: 8 rows of 144 bytes lie in 8 different groups of banks."""


def matrices(h: Array) -> Array:
    """Return M_l transposed, the largest l first; see `mosaic_gpu`.

    [D, i, (l, j)] = h[64 l + i - j].
    """
    return toeplitz(h, CHUNK, (REACH + 1) * CHUNK, REACH * CHUNK)


def block_of(lag: int) -> slice:
    """Return where M_lag is among the columns of `matrices`."""
    return slice((REACH - lag) * CHUNK, (REACH - lag + 1) * CHUNK)


def read_shifted(buffer: Any, start: int) -> Array:
    """Read the tile that starts at chunk `start` of a buffer of pitch `PITCH`."""
    return plgpu.load(buffer.at[start : start + ROWS, :CHUNK], layout=plgpu.Layout.WGMMA, optimized=False)


def linked(tiles: Sequence[Array], documents: TileDocuments | None) -> list[Array]:
    """Return a tile and those 1, 2, ... chunks before it in the walk.

    Only what reaches the tile's chunks is kept of them.
    """
    if documents is None:
        return list(tiles)
    return [tiles[0], *(documents.linked(z, chunks) for chunks, z in enumerate(tiles[1:]))]


def convolve_tile(
    left: Sequence[Array],
    right: Sequence[Any],
    documents: TileDocuments | None,
    interpret: bool,
    kept: Any = None,
) -> Array:
    """Return sum_l left_l @ right_l of `linked` tiles.

    In packed rows each document of a chunk is summed by itself. `kept` is where the first of them lies in shared
    memory, if it is not to stay in registers.
    """
    if documents is None:
        return sum_of_products(left, right, interpret)
    out = sum_of_products([documents.first(left[0]), *left[1:]], right, interpret)

    def product(own: Callable[[Array], Array]) -> Array:
        return sum_of_products([own(left[0] if kept is None else read(kept))], right[:1], interpret)

    return documents.cut_apart(out, product)


def sum_of_products(left: Sequence[Array], right: Sequence[Any], interpret: bool) -> Array:
    """Return sum_l left_l @ right_l in fp32; left in registers, right in shared memory."""
    if interpret:  # The simulation knows no product whose left operand is in registers.
        products = [
            jnp.dot(a, b[...], preferred_element_type=jnp.float32) for a, b in zip(left, right, strict=True)
        ]
        return sum(products[1:], products[0])

    def accumulate(total: Any) -> Array:
        for a, b in zip(left, right, strict=True):
            plgpu.wgmma(total, a, b)
        return total[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32))
