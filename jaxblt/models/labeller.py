"""A model that answers with labels: a language model's own states under a head for classes or numbers."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.models.both_strands import find_partners, mean_of_strands, read_both, twice
from jaxblt.models.label_head import LabelHeadConfig
from jaxblt.models.no_decoding import NoDecoding
from jaxblt.models.row_layout import RowLayout
from jaxblt.models.stack import StackConfig
from jaxblt.models.task_heads import TaskAnswers, TaskHeadsConfig
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.patches import Patches
from jaxblt.show import show
from jaxblt.validation import check_buildable, check_fields

HEAD = "label_head"
"""The submodule that `Labeller` adds to the parameters of its base."""


@dataclasses.dataclass(frozen=True)
class LabellerConfig:
    """A base model and a head for labels. A row holds one record, with padding behind it.

    Parameters of the base keep the names that they have in the base, so that a run of it can be started from.

    Attributes:
      base: config of a model with `hidden`, such as `ByteLMConfig` or `BLTConfig`.
      head: what is asked; `TaskHeadsConfig` asks for several labels at once.
      strands: "both" reads DNA from both ends and answers with the mean. A record and its reverse complement then have
        one answer, and a base and its partner one class. It takes twice the time.
    """

    base: Any
    head: LabelHeadConfig | TaskHeadsConfig = LabelHeadConfig()
    strands: Literal["one", "both"] = "one"

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_buildable(self, "base")
        if self.layout != CONTIGUOUS:
            raise ValueError(
                f"labels need bytes in order, and the base's layout is {self.layout.kind!r}: use layout='contiguous'"
            )
        if self.strands == "both" and getattr(self.head, "crf", False):
            raise ValueError(
                "LabellerConfig.strands = 'both' takes the mean of both strands, and the potentials of a CRF are of "
                "one direction: set head.crf=False, or strands='one'"
            )

    def check(self, recipe: Any) -> None:
        """Check what the head demands of a recipe, and that both strands are read in whole rows."""
        self.head.check(recipe)
        if self.strands == "both" and recipe.mesh.seq != 1:
            raise ValueError(
                f"strands = 'both' reads whole rows from both ends, and mesh.seq is {recipe.mesh.seq}: set it to 1"
            )

    @property
    def layout(self) -> SequenceLayout:
        """The order in which bytes come where a mesh splits the sequence."""
        return getattr(self.base, "layout", CONTIGUOUS)

    @property
    def causal(self) -> bool:
        """True if position t of the base sees nothing after t."""
        return self.base.causal

    @property
    def vocab_size(self) -> int:
        """Ids of the base."""
        return self.base.vocab_size

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "LabellerConfig":
        """Return the config for rows in which documents lie as said."""
        return dataclasses.replace(self, base=self.base.in_rows(of_bytes, of_slots))

    def build(
        self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None, name: str | None = None
    ) -> "Labeller":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Raises:
          ValueError: the base has no `hidden`, or no patches while there is a patcher, or patches of both strands.
        """
        if self.strands == "both" and patcher is not None:
            raise ValueError(
                f"LabellerConfig.strands = 'both' reads bytes, and patches of mode {patcher.mode!r} are of one strand: "
                "take a base without patches, or strands='one'"
            )
        base = self.base.build(dtype=dtype, patcher=patcher)
        if not hasattr(base, "hidden"):
            raise ValueError(
                f"model {type(base).__name__} has no `hidden`, which gives a head its states: take a ByteLM or a BLT"
            )
        return Labeller(self, dtype, patcher, name=name)


class Labeller(NoDecoding, nn.Module):
    """Logits of classes, or numbers, from the states that the base's own head reads (behind its norm)."""

    config: LabellerConfig
    dtype: Any = jnp.float32
    patcher: PatcherConfig | None = None

    def setup(self) -> None:
        self.base = self.config.base.build(dtype=self.dtype, patcher=self.patcher)
        # Keep the base's parameters where its own runs have them: embedding/..., not base/embedding/...
        nn.share_scope(self, self.base)
        self.label_head = self.config.head.build(self.config.causal, self.dtype)

    @nn.nowrap
    def _apart(self) -> Any:
        """Return the base as a module of its own."""
        return self.config.base.build(dtype=self.dtype, patcher=self.patcher)

    @property
    def stacks(self) -> dict[str, StackConfig]:
        """The stacks of the base."""
        return self._apart().stacks

    @property
    def patch_stacks(self) -> tuple[str, ...]:
        """The patch stacks of the base."""
        return getattr(self._apart(), "patch_stacks", ())

    @property
    def grid(self) -> int:
        """The grid of the base."""
        return self._apart().grid

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: Float[Array, "B T"] | None = None,
        patches: Patches | None = None,
    ) -> tuple[Float[Array, "B *N"] | TaskAnswers, Patches | None]:
        """Return logits, potentials or all tasks' answers, and the patches.

        Logits are [B, C] of rows or [B, T, C] of bytes; potentials are of a CRF.
        """
        if self.config.strands == "both":
            return self._both(ids, segment_ids, positions), None
        options = {"segment_ids": segment_ids, "positions": positions}
        states, patches = self.base.hidden(ids, **options, entropies=entropies, patches=patches)
        return self.label_head(states, ids, segment_ids), patches

    def _both(
        self,
        ids: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None,
    ) -> Float[Array, "B *N"] | TaskAnswers:
        """Return the mean of what the model answers to each strand."""
        partners = find_partners(ids, segment_ids)
        rows, segments = read_both(ids, partners), twice(segment_ids)
        states, _ = self.base.hidden(rows, segment_ids=segments, positions=twice(positions))
        said = self.label_head(states, rows, segments)
        if not isinstance(said, TaskAnswers):
            return mean_of_strands(said, partners)
        return said.replace(outputs={name: mean_of_strands(x, partners) for name, x in said.outputs.items()})  # pyright: ignore
