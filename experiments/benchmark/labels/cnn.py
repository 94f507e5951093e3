"""A plain convolutional classifier of rows of bytes: what a fine-tuned model of equal size has to beat."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.layers import Linear, RMSNorm, named
from jaxblt.models.label_head import content
from jaxblt.models.pooling import pool

MOST_WIDTH = 4096


@dataclasses.dataclass(frozen=True)
class CNNConfig:
    """Embedding, convolutions with residual connections, the maximum over bytes, and a head.

    Attributes:
      width: channels.
      layers: convolutions.
      taps: positions that each sees.
      outputs: classes.
      dropout: share of channels that are dropped in training, behind each convolution.
      causal: what the objective says of the models that it is compared with; a class of a row sees the whole row.
    """

    width: int = 64
    layers: int = 4
    taps: int = 9
    outputs: int = 2
    dropout: float = 0.1
    causal: bool = True

    vocab_size = VOCAB_SIZE

    def build(self, *, dtype: Any = jnp.float32, patcher: None = None) -> "CNN":
        """Return the module; there are no patches."""
        return CNN(self, dtype)


class CNN(nn.Module):
    """x += gelu(conv(norm(x))) a layer."""

    config: CNNConfig
    dtype: Any = jnp.float32

    patcher = None

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Any = None,
        entropies: None = None,
        patches: None = None,
    ) -> tuple[Float[Array, "B C"], None]:
        """Return logits of each row's class in fp32, and no patches."""
        config, there = self.config, content(ids, segment_ids)
        init: Any = named(nn.initializers.normal(1.0), "vocab", "embed")
        table = self.param("embedding", init, (VOCAB_SIZE, config.width), jnp.float32)
        x = jnp.take(table, ids, axis=0).astype(self.dtype)
        for i in range(config.layers):
            y = RMSNorm(dtype=self.dtype, name=f"norm_{i}")(x) * there[..., None].astype(self.dtype)
            y = jax.nn.gelu(nn.Conv(config.width, (config.taps,), dtype=self.dtype, name=f"conv_{i}")(y))
            x = x + nn.Dropout(config.dropout, deterministic=not self.has_rng("dropout"))(y)
        x = RMSNorm(dtype=self.dtype, name="norm")(pool(x, there, "max"))
        sizes, names, zeros = {"c": config.outputs}, ("embed", None), nn.initializers.zeros
        head = Linear(
            "bd,dc->bc", sizes, names, self.dtype, bias=zeros, accumulate=jnp.float32, name="outputs"
        )
        return head(x), None


def equal_size(count: int, outputs: int) -> CNNConfig:
    """Return the CNN whose number of parameters is nearest to `count`, embeddings included."""

    def size(width: int) -> int:
        config = CNNConfig(width=width, outputs=outputs)
        layer = config.taps * width**2 + 2 * width
        return VOCAB_SIZE * width + config.layers * layer + width + outputs * (width + 1)

    width = min(range(8, MOST_WIDTH), key=lambda width: abs(size(width) - count))
    return CNNConfig(width=width, outputs=outputs)
