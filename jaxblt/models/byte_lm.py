"""A language model straight over bytes: the plain Transformer or Hyena baseline, and the entropy model."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import BOS, VOCAB_SIZE
from jaxblt.layers import Linear, OpenSum, RMSNorm, close_sum, token_products
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.driver.prepared import COLLECTION as PREPARED
from jaxblt.models.embeddings import (
    ByteEmbedding,
    EmbeddingConfig,
    HashConfig,
    check_embedding_state,
    check_vocab_size,
    init_embedding_state,
)
from jaxblt.models.positions import last_index
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.stack import Stack, StackConfig, StackState, init_stack_state
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.patching.config import PatcherConfig
from jaxblt.show import show
from jaxblt.validation import check_fields


@dataclasses.dataclass(frozen=True)
class ByteLMConfig:
    """A language model over bytes: embedding, one stack, norm and head.

    Attributes:
      stack: the blocks; its width is the model's. The pattern "A" makes a byte Transformer, "H" a byte Hyena.
      hash: tables of n-grams that are added to the byte embedding, or None.
      tie_head: compute logits with the byte embedding instead of a separate matrix.
      head_bias: add a bias to each logit.
      reads_bos: False makes BOS a hole: a document begins with its first byte, which the model does not predict.
      vocab_size: number of ids.
    """

    stack: StackConfig = StackConfig()
    hash: HashConfig | None = None
    tie_head: bool = True
    head_bias: bool = False
    reads_bos: bool = True
    vocab_size: int = VOCAB_SIZE

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_vocab_size(self)
        if self.head_bias and self.tie_head:
            raise ValueError(
                "ByteLMConfig.head_bias = True is read with tie_head=False only: set it, or leave it out"
            )
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
        """True if position t sees nothing after t."""
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
        """Return the config for rows in which documents lie as `of_bytes` says; there are no slots."""
        return promise(self, of_bytes)

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "ByteLM":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Raises:
          ValueError: there is a patcher.
        """
        if patcher is not None:
            raise ValueError(
                f"a ByteLM has no patches, got a patcher of mode {patcher.mode!r}: set patcher=None, or use a BLTConfig"
            )
        return ByteLM(self, dtype, name=name)


@flax.struct.dataclass
class ByteLMState:
    """Streaming state of a byte language model."""

    embedding: Any
    stack: StackState

    __repr__ = show


def init_byte_lm_state(
    config: ByteLMConfig, batch_size: int, *, capacity: int, dtype: Any = jnp.float32
) -> ByteLMState:
    """Return the state before the first byte, for documents of at most `capacity` bytes.

    Raises:
      ValueError: the model is bidirectional.
    """
    if not config.causal:
        raise ValueError("a bidirectional model cannot generate: build it with causal stacks")
    return ByteLMState(
        embedding=init_embedding_state(config.embedding, batch_size),
        stack=init_stack_state(config.stack, batch_size, capacity=capacity, dtype=dtype),
    )


TURNED = "turned"
"""The name of `turn_table`'s result in the collection "prepared" of a head."""

LINE = 64
"""Columns of a matrix in 16 bits that fill a line of memory."""


def turn_table(table: Float[Array, "V D"]) -> Float[Array, "D _"]:
    """Return a byte table as a matrix that one token multiplies, with zeros up to whole lines of memory.

    XLA would turn it at each byte. It would also choose a layout for it that the tables of n-grams get too.
    """
    return jnp.pad(table.T, ((0, 0), (0, -len(table) % LINE)))


class Head(nn.Module):
    """The stack's norm, then logits in fp32: the byte embedding's transpose when tied, else a matrix of its own."""

    vocab_size: int
    tied: bool
    dtype: Any
    stack: StackConfig
    biased: bool = False

    def setup(self) -> None:
        self.norm = self.stack.norm(self.dtype)
        if not self.tied:
            sizes, names = {"v": self.vocab_size}, ("embed", "vocab")
            bias = nn.initializers.zeros if self.biased else None
            self.logits = Linear("btd,dv->btv", sizes, names, self.dtype, bias=bias, accumulate=jnp.float32)

    def __call__(self, x: Float[Array, "B T D"] | OpenSum, embedding: ByteEmbedding) -> Float[Array, "B T V"]:
        if isinstance(x, OpenSum) and isinstance(self.norm, RMSNorm) and self.has_variable(PREPARED, TURNED):
            columns = self.get_variable(PREPARED, TURNED)
            logits = jnp.sum(token_products(x, [columns], self.norm)[1], 0)
            return logits[None, None, : self.vocab_size]
        x = self.norm(close_sum(x))
        return embedding.attend(x) if self.tied else self.logits(x)

    def states(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the states that logits are read off."""
        return self.norm(x)


class ByteLM(nn.Module):
    """p(byte t+1 | bytes ≤ t); with `causal=False` logits of byte t from the whole document."""

    config: ByteLMConfig
    dtype: Any = jnp.float32

    patcher = None
    grid = 1

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks by the names of their submodules, in the order in which bytes pass them."""
        return {"stack": self.config.stack}

    def setup(self) -> None:
        self.embedding = ByteEmbedding(self.config.embedding, self.dtype)
        config = self.config
        self.stack = Stack(config.stack, self.dtype)
        self.head = Head(config.vocab_size, config.tie_head, self.dtype, config.stack, config.head_bias)

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: None = None,
        patches: None = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Return logits in fp32, and no patches.

        Args:
          ids: byte ids.
          segment_ids: documents, 0 for padding; None for one document a row.
          positions: offset in the document; None counts the row.
          entropies: None; they are of models with patches.
          patches: None, likewise.
        """
        _check_no_patches(entropies, patches)
        return self.head(self._mixed(ids, segment_ids, positions), self.embedding), None

    def hidden(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: None = None,
        patches: None = None,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Return what the head reads logits off, for another head.

        Arguments are those of `__call__`.
        """
        _check_no_patches(entropies, patches)
        return self.head.states(self._mixed(ids, segment_ids, positions)), None

    def _mixed(self, ids: Int[Array, "B T"], segment_ids: Any, positions: Any) -> Float[Array, "B T D"]:
        segment_ids = self._content(ids, segment_ids)
        x, _ = self.embedding(ids, segment_ids=segment_ids)
        return self.stack(x, segment_ids=segment_ids, positions=positions)[0]

    @nn.nowrap
    def _content(
        self, ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
    ) -> Int[Array, "B T"] | None:
        """Return segment ids that make a hole of each BOS that is not read."""
        if self.config.reads_bos:
            return segment_ids
        given = jnp.ones_like(ids) if segment_ids is None else segment_ids
        return jnp.where(ids == BOS, -jnp.abs(given), given)

    @nn.nowrap
    def init_state(self, batch_size: int, *, num_bytes: int) -> ByteLMState:
        """Return the state before the first byte, for documents of at most `num_bytes` bytes."""
        return init_byte_lm_state(self.config, batch_size, capacity=num_bytes, dtype=self.dtype)

    def prefill(
        self,
        ids: Int[Array, "B T"],
        state: ByteLMState,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: None = None,
    ) -> tuple[Float[Array, "B V"], ByteLMState]:
        """Return logits after each row's last byte, and the state behind it.

        See `LanguageModel.prefill`.
        """
        _check_no_patches(entropies, None)
        x, state = self._read(ids, state, segment_ids)
        x, last = close_sum(x), last_index(segment_ids)[:, None, None]
        return self.head(jnp.take_along_axis(x, last, 1), self.embedding)[:, 0], state

    def step(
        self,
        ids: Int[Array, "B"],
        state: ByteLMState,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: None = None,
    ) -> tuple[Float[Array, "B V"], Bool[Array, "B"], ByteLMState]:
        """Return logits of the byte after each row's next byte; see `LanguageModel.step`."""
        _check_no_patches(entropies, None)
        column = None if segment_ids is None else segment_ids[:, None]
        logits, state = self.stream(ids[:, None], state, segment_ids=column)
        return logits[:, 0], jnp.zeros(ids.shape, bool), state

    @nn.nowrap
    def boundaries(self, state: ByteLMState) -> None:
        """Return None: there are no patches."""

    def stream(
        self,
        ids: Int[Array, "B T"],
        state: ByteLMState,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        entropies: None = None,
    ) -> tuple[Float[Array, "B T V"], ByteLMState]:
        """Return logits of the next bytes of each row, and the state after them.

        Any split gives the same logits.
        """
        _check_no_patches(entropies, None)
        x, state = self._read(ids, state, segment_ids)
        return self.head(x, self.embedding), state

    def _read(
        self, ids: Int[Array, "B T"], state: ByteLMState, segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T D"] | OpenSum, ByteLMState]:
        # Leave calls without ids as they are: they continue documents, and BOS begins one
        segment_ids = segment_ids if segment_ids is None else self._content(ids, segment_ids)
        before = check_embedding_state(self.config.embedding, state.embedding)
        x, embedding = self.embedding(ids, segment_ids=segment_ids, state=before)
        x, stack = self.stack(x, segment_ids=segment_ids, state=state.stack, leaves_sum=True)
        assert stack is not None
        return x, ByteLMState(embedding=embedding, stack=stack)


def _check_no_patches(entropies: Any, patches: Any) -> None:
    if entropies is not None or patches is not None:
        given = "entropies" if patches is None else "patches"
        raise ValueError(f"a ByteLM has no patches, got {given}: leave them out, or use a BLTConfig")
