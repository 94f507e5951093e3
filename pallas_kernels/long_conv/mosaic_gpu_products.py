"""Complex tiles of 64 x 64 in the Hopper kernel: products by the DFT's matrix, and element by element.

Left operands lie in shared memory as right ones do: see docs/notes/mosaic-gpu.md.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.tiles import read
from pallas_kernels._hopper import CHUNK, ROWS
from pallas_kernels.long_conv.hopper import Ring
from pallas_kernels.long_conv.monarch_vjp import LARGEST_NORM

Complex = tuple[Array, Array]
"""Real and imaginary part of a tile, in fp32 and registers."""


class Dft(NamedTuple):
    """A matrix F, or its conjugate, or the transpose of either.

    Attributes:
      parts: -Im F, Re F and Im F side by side in shared memory.
      conjugated: stands for the conjugate.
      transposed: stands for the transpose; not where it is the right operand.
    """

    parts: Any
    conjugated: bool = False
    transposed: bool = False

    def conjugate(self) -> "Dft":
        return self._replace(conjugated=not self.conjugated)

    def adjoint(self) -> "Dft":
        return self.conjugate()._replace(transposed=not self.transposed)

    def left(self, part: int) -> Any:
        """Return a part as a left operand."""
        columns = self.columns(part)
        return columns.T if self.transposed else columns

    def columns(self, first: int, count: int = 1) -> Any:
        """Return `count` parts side by side."""
        return self.parts.at[:, first * CHUNK : (first + count) * CHUNK]


def from_left(dft: Dft, tile: Sequence[Any]) -> Complex:
    """Return F X of a tile in shared memory."""
    negative, real, imaginary = (dft.left(i) for i in ((2, 1, 0) if dft.conjugated else (0, 1, 2)))

    def issue(*totals: Any) -> Complex:
        for total, lefts in zip(totals, ((real, negative), (imaginary, real)), strict=True):
            for left, right in zip(lefts, tile, strict=True):
                plgpu.wgmma(total, left, right)
        return totals[0][...], totals[1][...]

    total = plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32)
    return pl.run_scoped(issue, total, total)


def from_right(tile: Sequence[Any], dft: Dft) -> Complex:
    """Return X F of a tile in shared memory, both parts in one product.

    A left operand is read once for both.
    """
    rights = [dft.columns(i, 2) for i in ((0, 1) if dft.conjugated else (1, 0))]

    def issue(total: Any) -> Array:
        for left, right in zip(tile, rights, strict=True):
            plgpu.wgmma(total, left, right)
        return total[...]

    both = pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((ROWS, 2 * CHUNK), jnp.float32))
    first, second = both[:, :CHUNK], both[:, CHUNK:]
    return (second, first) if dft.conjugated else (first, second)


def store(tile: Sequence[Any], parts: Complex) -> None:
    """Store a tile in fp16 where tensor cores will read it, and fence it for them."""
    for ref, part in zip(tile, parts, strict=True):
        ref[...] = part.astype(jnp.float16)
    plgpu.commit_smem()


def times(z: Complex, parts: Sequence[Any], *, conjugated: bool = False, dtype: Any = jnp.float32) -> Complex:
    """Multiply z by a tile in shared memory, or its conjugate, element by element."""
    return product(z, [read(part).astype(dtype) for part in parts], conjugated=conjugated, dtype=dtype)


def product(
    z: Complex, other: Sequence[Array], *, conjugated: bool = False, dtype: Any = jnp.float32
) -> Complex:
    """Multiply z by the other, or its conjugate, element by element.

    In fp16 an instruction takes two elements.
    """
    (a, b), (c, d) = (tuple(part.astype(dtype) for part in factor) for factor in (z, other))
    if conjugated:
        return a * c + b * d, b * c - a * d
    return a * c - b * d, a * d + b * c


def parts_of(ref: Any, j: Array | int = 0) -> list[Any]:
    """Return real and imaginary part of tile (or row) j."""
    return [ref.at[2 * j], ref.at[2 * j + 1]]


def by_column(ref: Any) -> Float[Array, "64 64"]:
    """Read one number a column in each row, from shared memory."""
    numbers = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(numbers, (ROWS, CHUNK), (1,))


def by_row(ref: Any) -> Float[Array, "64"]:
    """Read one number for each row of a tile, from shared memory."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def spread(z: Float[Array, "64"]) -> Float[Array, "64 64"]:
    """Spread one number a row over each column."""
    return lax.broadcast_in_dim(z, (ROWS, CHUNK), (0,))


def row_scales(
    tiles: Iterable[Float[Array, "64 64"]], sizes: Any, ring: Ring
) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """Return the power of two that scales each row of tiles, and one over it.

    `sizes` is room for 64 numbers.
    """
    largest = reduce(jnp.maximum, (jnp.abs(tile) for tile in tiles))
    sizes[...] = jnp.max(largest, axis=1)
    all_rows = by_column(sizes)
    if ring.together > 1:
        at, of = (
            plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        all_rows = jnp.where(at // ring.height == of // ring.height, all_rows, 0.0)
    return scales(jnp.max(all_rows, axis=1), ring.points)


def scales(largest: Float[Array, "64"], points: int) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """Return the power of two that keeps so many numbers' norm below 2^14, and one over it.

    No number is larger than `largest`.
    """
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    # Bound the norm: the largest is below 2^(exponent - 126), and the norm at most the square root of `points` times
    # that.
    bits = LARGEST_NORM - ((points - 1).bit_length() + 1) // 2
    shift = jnp.clip(126 + bits - exponent, -120, 120)
    return two_to(shift), two_to(-shift)


def two_to(exponent: Int[Array, "64"]) -> Float[Array, "64"]:
    """Return 2^exponent, of -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
