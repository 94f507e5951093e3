"""Squares of pixels as tokens: rows of an image become shorter, and reach as far with fewer blocks."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.layers import Linear


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
        rows, length, dim = x.shape
        if length % (self.columns * self.side):
            raise ValueError(
                f"a row of {length} pixels is no image of {self.columns} columns in squares of {self.side} x "
                f"{self.side}: set columns, or squares=1"
            )
        pixels = x.reshape(rows, -1, self.side, self.columns // self.side, self.side, dim)
        names = (None, None, None, "embed")
        y = Linear("byixjd,ijde->byxe", {"e": dim}, names, self.dtype, name="pixels")(pixels)
        return y.reshape(rows, -1, dim)
