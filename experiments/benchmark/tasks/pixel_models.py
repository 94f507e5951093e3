"""What a classifier of rows of pixels has to beat: a linear one, and a small convolutional one that sees the square."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import OFFSET
from jaxblt.models.pooling import pool
from jaxblt.models.row_norm import RowNorm


def as_square(ids: Int[Array, "B T"]) -> Float[Array, "B S S"]:
    """Return grey levels in 0..1 of rows of pixels."""
    side = int(ids.shape[1] ** 0.5)
    return (ids - OFFSET).astype(jnp.float32).reshape(len(ids), side, side) / 255


class LinearPixels(nn.Module):
    """Logistic regression: logits are a linear map of all grey levels."""

    classes: int

    @nn.compact
    def __call__(self, ids: Int[Array, "B T"]) -> tuple[Float[Array, "B C"], None]:
        """Return logits, and no patches."""
        return nn.Dense(self.classes, name="classes")(as_square(ids).reshape(len(ids), -1)), None


class SquareCNN(nn.Module):
    """x += conv(gelu(conv(norm x))) a block, all 3 x 3, then the mean over pixels; norms are of channels over pixels.

    Attributes:
      classes: of the head.
      width: channels.
      blocks: of two convolutions.
      dtype: of the computation.
    """

    classes: int
    width: int
    blocks: int = 6
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, ids: Int[Array, "B T"]) -> tuple[Float[Array, "B C"], None]:
        """Return logits in fp32, and no patches."""
        # Keep black pixels off zero: norms multiply gradients of an image that is all zero by a thousand in each block
        x = self._conv("first")((as_square(ids)[..., None] - 0.5).astype(self.dtype))
        for i in range(self.blocks):
            norm = RowNorm(self.dtype, name=f"norm_{i}")
            y = self._conv(f"in_{i}")(norm(x.reshape(len(x), -1, self.width)).reshape(x.shape))
            x = x + self._conv(f"out_{i}")(jax.nn.gelu(y))
        flat = x.reshape(len(x), -1, self.width)
        pooled = nn.RMSNorm(name="norm")(pool(flat, jnp.ones(flat.shape[:2], bool), "mean"))
        return nn.Dense(self.classes, name="classes")(pooled), None

    def _conv(self, name: str) -> nn.Conv:
        return nn.Conv(self.width, (3, 3), dtype=self.dtype, name=name)


def cnn_of_size(parameters: int, classes: int, dtype: Any) -> SquareCNN:
    """Return the CNN whose number of parameters is nearest to a model's."""
    blocks = SquareCNN.blocks
    width = round((parameters / (2 * blocks * 9)) ** 0.5)
    return SquareCNN(classes, width, dtype=dtype)
