"""A classifier of rows of bytes: embedding, one stack, and a head over what the stack says of all bytes."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.layers import Linear
from jaxblt.models.embeddings import ByteEmbedding, EmbeddingConfig, HashConfig, check_vocab_size
from jaxblt.models.no_decoding import NoDecoding
from jaxblt.models.pooling import pool
from jaxblt.models.positions import PeriodicPosition, document_positions
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.squares import Levels, Squares, ids_of_squares, positions_of_squares
from jaxblt.models.stack import Stack, StackConfig
from jaxblt.parallel.layout import CONTIGUOUS
from jaxblt.patching.config import PatcherConfig
from jaxblt.validation import check_bounds, check_fields, check_read

Pooling = Literal["mean", "last"]


@dataclasses.dataclass(frozen=True)
class ByteClassifierConfig:
    """Logits of a row's class, for the objective `Classify`. A row holds one document, with padding behind it.

    Attributes:
      stack: the blocks; its width is the model's.
      num_classes: of the head.
      pooling: the mean over the row's bytes, or the last byte.
      hash: n-gram tables added to the byte embedding, or None.
      periods: of sinusoids of the position, in bytes, of which a linear map is added to the embedding; () for none. In
        images of 32 columns a period of 32 tells the column.
      levels: bytes are grey levels, whose linear map takes the embedding's place (see `Levels`).
      squares: pixels of an image's squares, each way, of which the stack reads each as one token (see `Squares`).
      columns: pixels of the rows of images that are read in squares. An image that ends amid a row of squares is filled
        up with zeros.
      vocab_size: ids.
    """

    stack: StackConfig = StackConfig()
    num_classes: int = 2
    pooling: Pooling = "mean"
    hash: HashConfig | None = None
    periods: tuple[int, ...] = ()
    levels: bool = False
    squares: int = 1
    columns: int = 32
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "num_classes", least=2, why=": a row is of one class or another")
        check_bounds(self, "periods", "squares", "columns", least=1)
        check_read(self, "hash", needed="levels=False", is_read=not self.levels)
        check_read(self, "columns", needed="squares above 1", is_read=self.squares > 1)
        if self.columns % self.squares:
            raise ValueError(
                f"ByteClassifierConfig.squares = {self.squares} does not divide columns = {self.columns}: use a divisor"
            )
        check_vocab_size(self)
        if self.stack.layout != CONTIGUOUS:
            raise ValueError(
                f"a classifier reads bytes in order, and the stack's layout is {self.stack.layout.kind!r}: use "
                "layout='contiguous'"
            )

    def check(self, recipe: Any) -> None:
        """Check that a recipe's objective asks for a class of each row."""
        objective = recipe.objective
        if getattr(objective, "target", None) != "class":
            raise ValueError(
                f"model {type(self).__name__} answers with a class for each row, and the objective is "
                f"{type(objective).__name__}: use Classify and data with labels, or a language model"
            )

    @property
    def causal(self) -> bool:
        """True if the stack is causal; `Classify(causal=...)` says the same."""
        return self.stack.causal

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "ByteClassifierConfig":
        """Return the config for rows in which documents lie as `of_bytes` says; there are no slots."""
        return promise(self, of_bytes)

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "ByteClassifier":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Raises:
          ValueError: there is a patcher.
        """
        if patcher is not None:
            raise ValueError(f"a ByteClassifier has no patches, got mode {patcher.mode!r}: set patcher=None")
        return ByteClassifier(self, dtype, name=name)


class ByteClassifier(NoDecoding, nn.Module):
    """Logits = RMSNorm(pool(stack(embedding))) W + b."""

    config: ByteClassifierConfig
    dtype: Any = jnp.float32

    patcher = None
    grid = 1

    @nn.compact
    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: None = None,
        patches: None = None,
    ) -> tuple[Float[Array, "B C"], None]:
        """Return fp32 logits of each row's class, and no patches.

        Zeros are pooled where a row holds nothing.

        Args:
          ids: byte ids.
          segment_ids: 0 for padding; None for full rows.
          positions: offset in the document; None counts the row.
          entropies: None; they are of models with patches.
          patches: None, likewise.
        """
        config = self.config
        table = EmbeddingConfig(dim=config.stack.dim, hash=config.hash, vocab_size=config.vocab_size)
        if config.levels:
            x = Levels(config.stack.dim, self.dtype, name="levels")(ids)
        else:
            x, _ = ByteEmbedding(table, self.dtype, name="embedding")(ids, segment_ids=segment_ids)
        if config.periods:
            place = document_positions(ids, segment_ids) if positions is None else positions
            x = x + PeriodicPosition(config.periods, config.stack.dim, self.dtype, name="positions")(place)
        if config.squares > 1:
            if segment_ids is not None:
                # The last squares of an image may hold padding, which would be read with its pixels
                x = jnp.where((segment_ids > 0)[..., None], x, 0)
                segment_ids = ids_of_squares(segment_ids, config.squares, config.columns)
            x = Squares(config.squares, config.columns, self.dtype, name="squares")(x)
            if positions is not None:
                positions = positions_of_squares(positions, config.squares, config.columns)
        x, _ = Stack(config.stack, self.dtype, name="stack")(x, segment_ids=segment_ids, positions=positions)
        there = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids > 0
        norm = config.stack.norm(self.dtype, "norm")
        x = norm(pool(x, there, config.pooling))
        sizes, names, zeros = {"c": config.num_classes}, ("embed", None), nn.initializers.zeros
        head = Linear(
            "bd,dc->bc", sizes, names, self.dtype, bias=zeros, accumulate=jnp.float32, name="classes"
        )
        return head(x), None
