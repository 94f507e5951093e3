"""A language model straight over bytes: the plain Transformer or Hyena baseline, and the entropy model."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.layers import Linear, RMSNorm
from jaxblt.mixers import AttentionConfig
from jaxblt.models.embeddings import (
    ByteEmbedding,
    EmbeddingConfig,
    HashConfig,
    check_vocab_size,
    init_embedding_state,
)
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.stack import Stack, StackConfig, StackState, init_stack_state
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.validation import check_fields


@dataclasses.dataclass(frozen=True)
class ByteLMConfig:
    """Embedding, one stack, norm and head.

    Attributes:
      stack: the blocks; its width is the model's. "A" alone is a byte Transformer, "H" a byte Hyena.
      hash: n-gram tables added to the byte embedding, or None.
      tie_head: read logits off the byte embedding instead of a matrix of their own.
      vocab_size: ids.
    """

    stack: StackConfig = StackConfig()
    hash: HashConfig | None = None
    tie_head: bool = True
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocab_size(self)
        if self.layout != CONTIGUOUS and self.hash is not None:
            raise ValueError(
                f"n-grams need bytes in order, and stack.attention.layout is {self.layout.kind!r}: set hash=None, or "
                "layout='contiguous'"
            )

    @property
    def layout(self) -> SequenceLayout:
        """The order in which bytes come where a mesh splits the sequence."""
        return self.stack.layout

    @property
    def causal(self) -> bool:
        """Whether position t sees nothing after t."""
        return self.stack.causal

    @property
    def receptive_field(self) -> int | None:
        """Bytes before a byte that its logits depend on; None without a bound (attention to all, convolutions)."""
        mixers = [self.stack.mixer(name) for name in self.stack.pattern]
        windows = [mixer.window for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window]
        if len(windows) < len(mixers):
            return None
        layers = [windows[i % len(windows)] - 1 for i in range(self.stack.num_layers)]
        return sum(layers) + (0 if self.hash is None else self.hash.reach)

    @property
    def embedding(self) -> EmbeddingConfig:
        """The config of the embedding."""
        return EmbeddingConfig(dim=self.stack.dim, hash=self.hash, vocab_size=self.vocab_size)

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "ByteLMConfig":
        """The config for rows of bytes in which documents lie as `of_bytes` says; there are no slots."""
        return promise(self, of_bytes)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "ByteLM":
        """The module; parameters are fp32, computation in `dtype`, logits in fp32."""
        return ByteLM(self, dtype, name=name)


@flax.struct.dataclass
class ByteLMState:
    """Streaming state of a byte language model."""

    embedding: Any
    stack: StackState


def init_byte_lm_state(
    config: ByteLMConfig, batch_size: int, *, capacity: int, dtype: Any = jnp.float32
) -> ByteLMState:
    """The state before the first byte, for documents of at most `capacity` bytes."""
    return ByteLMState(
        embedding=init_embedding_state(config.embedding, batch_size),
        stack=init_stack_state(config.stack, batch_size, capacity=capacity, dtype=dtype),
    )


class Head(nn.Module):
    """Final norm, then logits in fp32: the byte embedding's transpose when tied, else a matrix of its own."""

    vocab_size: int
    tied: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], embedding: ByteEmbedding) -> Float[Array, "B T V"]:
        x = RMSNorm(dtype=self.dtype, name="norm")(x)
        if self.tied:
            return embedding.attend(x)
        sizes, names = {"v": self.vocab_size}, ("embed", "vocab")
        return Linear("btd,dv->btv", sizes, names, self.dtype, accumulate=jnp.float32, name="logits")(x)


class ByteLM(nn.Module):
    """p(byte t+1 | bytes ≤ t); with `causal=False` logits of byte t from the whole document."""

    config: ByteLMConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.embedding = ByteEmbedding(self.config.embedding, self.dtype)
        self.stack = Stack(self.config.stack, self.dtype)
        self.head = Head(self.config.vocab_size, self.config.tie_head, self.dtype)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits, fp32.

        Args:
          ids: byte ids.
          segment_ids: documents, 0 for padding; None for one document a row.
          positions: offset in the document; None counts the row.
        """
        x, _ = self.embedding(ids, segment_ids=segment_ids)
        x, _ = self.stack(x, segment_ids=segment_ids, positions=positions)
        return self.head(x, self.embedding)

    def stream(
        self, ids: Int[Array, "B T"], state: ByteLMState, *, segment_ids: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T V"], ByteLMState]:
        """Logits of the next bytes of each row, and the state after them; any split gives the same logits."""
        x, embedding = self.embedding(ids, segment_ids=segment_ids, state=state.embedding)
        x, stack = self.stack(x, segment_ids=segment_ids, state=state.stack)
        assert stack is not None
        return self.head(x, self.embedding), ByteLMState(embedding=embedding, stack=stack)
