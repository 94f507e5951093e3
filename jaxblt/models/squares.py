"""Pixels of grey images as tokens: by their level, and in squares, which make rows shorter."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxblt.array_checks import check_ids, check_rows
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.layers import Linear


class Levels(nn.Module):
    """x = g W of bytes that are grey levels, g in 0..1: near levels are alike, where an embedding learns each apart.

    Attributes:
      dim: width of x.
      dtype: of x.
    """

    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return what stands for the level of each byte.

        Raises:
          ValueError: ids are no rows; or (outside of jit) an id is out of range.
        """
        check_rows("ids", ids)
        check_ids(ids, VOCAB_SIZE)
        levels = ((ids - OFFSET).astype(jnp.float32) / 255)[..., None].astype(self.dtype)
        return Linear("btc,cd->btd", {"d": self.dim}, (None, "embed"), self.dtype, name="level")(levels)


class Squares(nn.Module):
    """y = sum_ij x_ij W_ij over the pixels of each square, which come from left to right and from top to bottom.

    Attributes:
      side: pixels of a square's side.
      columns: pixels of the image's rows.
      dtype: of y.
    """

    side: int
    columns: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B N D"]:
        """Return N = T / side^2 tokens.

        Raises:
          ValueError: the image has rows that fill no squares.
        """
        names, (rows, _, dim) = (None, None, None, "embed"), x.shape
        pixels = _pixels(x, self.side, self.columns)
        y = Linear("byixjd,ijde->byxe", {"e": dim}, names, self.dtype, name="pixels")(pixels)
        return y.reshape(rows, -1, dim)


def ids_of_squares(segment_ids: Int[Array, "B T"], side: int, columns: int) -> Int[Array, "B N"]:
    """Return segment ids of squares: a square with any pixel of the image is a token.

    Raises:
      ValueError: the image has rows that fill no squares.
    """
    return _first_pixels(segment_ids, side, columns)


def positions_of_squares(positions: Int[Array, "B T"], side: int, columns: int) -> Int[Array, "B N"]:
    """Return positions of squares, which count squares from left to right, then down.

    Raises:
      ValueError: the image has rows that fill no squares.
    """
    y, x = jnp.divmod(_first_pixels(positions, side, columns), columns)
    return y // side * (columns // side) + x // side


def _first_pixels(x: Int[Array, "B T"], side: int, columns: int) -> Int[Array, "B N"]:
    """Return the value at each square's upper left pixel, which the image has if it has any of the square."""
    return _pixels(x, side, columns)[:, :, 0, :, 0].reshape(len(x), -1)


def _pixels(x: Shaped[Array, "B T ..."], side: int, columns: int) -> Shaped[Array, "B Y S X S ..."]:
    """Take rows of pixels apart into squares."""
    rows, length = x.shape[:2]
    if length % (columns * side):
        raise ValueError(
            f"a row of {length} pixels is no image of {columns} columns in squares of {side} x {side}: set columns, or "
            "squares=1"
        )
    return x.reshape(rows, -1, side, columns // side, side, *x.shape[2:])
