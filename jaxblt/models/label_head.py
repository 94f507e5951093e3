"""Heads that answer with labels: a class or a number of a row, or a class of each byte."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import OFFSET
from jaxblt.layers import Dropout, Linear, named
from jaxblt.models.pooling import AttentionPool, pool
from jaxblt.models.word_features import WordLogits, WordsConfig
from jaxblt.validation import check_bounds, check_fields, check_read


@dataclasses.dataclass(frozen=True)
class LabelHeadConfig:
    """The question asked of a row, and the way from its bytes' states to an answer.

    Attributes:
      target: a "class" of the row, a "number", or a class of each byte ("positions").
      outputs: classes; 1 for a number.
      pool: of a row's states: "mean" or "max" over its bytes, a learned weighted mean ("attention"), or "cls", the one
        state that has seen the whole record. It is that of BOS in bidirectional models and of the last byte in causal
        ones.
      dropout: in training, share of the pooled channels that are dropped; for classes, also of the records whose words
        do not answer.
      crf: for "positions", learn scores of a class behind another, which make a row a linear-chain CRF.
      words: of the record, whose logits are added to those of its states; None for states alone. With words the states
        say nothing before the first step, so that the model starts as a regression on words.
    """

    target: Literal["class", "number", "positions"] = "class"
    outputs: int = 2
    pool: Literal["cls", "mean", "max", "attention"] = "mean"
    dropout: float = 0.0
    crf: bool = False
    words: WordsConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dropout", least=0, below=1, why=": it is a share")
        rows = "target='class' or 'number'"
        for name in ("pool", "words"):
            check_read(self, name, needed=rows, is_read=self.target != "positions")
        if self.crf and self.target != "positions":
            raise ValueError(
                f"LabelHeadConfig.crf scores a byte's class behind another, and target is {self.target!r}: set "
                "target='positions', or crf=False"
            )
        if self.target == "number" and self.outputs != 1:
            raise ValueError(f"LabelHeadConfig.outputs must be 1 for a number, got {self.outputs}")
        if self.target != "number":
            check_bounds(self, "outputs", least=2, why=": a row is of one class or another")

    def check(self, recipe: Any) -> None:
        """Check that a CRF comes with the objective that is scored by its potentials."""
        check_crf(recipe)

    def build(self, causal: bool, dtype: Any) -> "LabelHead":
        """Build the module, over states of a causal model or not."""
        return LabelHead(self, causal, dtype)


def check_crf(recipe: Any) -> None:
    """Check that a CRF's loss has the potentials of a head with `crf`, and whole rows.

    Raises:
      ValueError: objective and head do not go together, or a mesh splits rows.
    """
    crf = getattr(getattr(recipe.model, "head", None), "crf", False)
    if crf != getattr(recipe.objective, "crf", False):
        raise ValueError(
            f"model.head.crf is {crf} and the objective is {type(recipe.objective).__name__}: objective ClassifyChain "
            "and head.crf=True go together"
        )
    if crf and recipe.mesh.seq != 1:
        raise ValueError(f"a CRF reads whole rows, and mesh.seq is {recipe.mesh.seq}: set it to 1")


def content(ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> Bool[Array, "B T"]:
    """Return True for a record's own bytes: neither padding nor holes nor special ids."""
    return (ids >= OFFSET) if segment_ids is None else (ids >= OFFSET) & (segment_ids > 0)


class LabelHead(nn.Module):
    """pool(x) W + b, or x W + b at every byte, in fp32; of rows plus what their words say, if the config has words.

    With a CRF the answer at a byte is φ[i, j] = (x W + b)[j] + A[i, j], the score of class j behind class i, in fp32.
    The last row of A, i = C, is for a record's first byte (`jaxblt.training.objectives.crf`).

    Attributes:
      config: of the head.
      causal: whether the states are of a causal model.
      dtype: of the product.
    """

    config: LabelHeadConfig
    causal: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B C"] | Float[Array, "B T C"] | Float[Array, "B T S C"]:
        """Return logits of classes, or numbers, or potentials of a CRF.

        Args:
          x: states of the bytes.
          ids: of the bytes; a row holds one record, of which BOS is not pooled.
          segment_ids: 0 for padding, negative for holes; None for full rows.
        """
        config = self.config
        if config.target != "positions":
            x = self._pooled(x, ids, segment_ids)
        x = Dropout(config.dropout)(x)
        zeros = nn.initializers.zeros
        logits = Linear(
            "...d,dc->...c",
            {"c": config.outputs},
            ("embed", None),
            self.dtype,
            bias=zeros,
            kernel_init=zeros if config.words else nn.initializers.lecun_normal(),
            accumulate=jnp.float32,
            name="outputs",
        )(x)
        if config.words is not None:
            logits += self._dropped(
                WordLogits(config.words, config.outputs, name="words")(ids, content(ids, segment_ids))
            )
        if not config.crf:
            return logits
        init: Any = named(nn.initializers.zeros, None, None)
        behind = self.param("transitions", init, (config.outputs + 1, config.outputs), jnp.float32)
        return logits[:, :, None] + behind[None, None]

    def _dropped(self, said: Float[Array, "B C"]) -> Float[Array, "B C"]:
        """Return what words say of classes, in training 0 for some records, so that states learn to tell alone.

        The fitted words know nearly all training records, which leaves states little to learn.
        """
        config = self.config
        if not config.dropout or config.target != "class" or not self.has_rng("dropout"):
            return said
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - config.dropout, (len(said), 1))
        return jnp.where(kept, said, 0)

    def _pooled(
        self, x: Float[Array, "B T D"], ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B D"]:
        there, pooling = content(ids, segment_ids), self.config.pool
        if pooling == "attention":
            return AttentionPool(name="pool")(x, there)
        if pooling == "cls" and not self.causal:
            inside = jnp.ones(ids.shape, bool) if segment_ids is None else segment_ids > 0
            return pool(x, inside, "first")
        return pool(x, there, "last" if pooling == "cls" else pooling)
