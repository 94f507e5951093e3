"""The options of a byte-patched model, and what they demand of each other; `BLTConfig` builds the model."""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, Literal

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.models.bridge_patterns import Pattern, read_distances
from jaxblt.models.embeddings import EmbeddingConfig, HashConfig, check_vocab_size
from jaxblt.models.level import LevelConfig
from jaxblt.models.positions import PositionConfig
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.stack import StackConfig
from jaxblt.parallel.layout import CONTIGUOUS
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields, check_kind, check_read


@dataclasses.dataclass(frozen=True)
class BLTOptions(ABC):
    """The options of a byte-patched model (Byte Latent Transformer, Pagnoni et al., 2412.09871).

    Attributes:
      encoder: stack over bytes that sees a window; its width is the bytes'.
      latent: stack over patches, where most of the work is done; its width is the patches' unless there is a level.
      decoder: stack over bytes that turns patch vectors into byte predictions; as wide as the encoder.
      hash: n-gram tables added to the byte embedding, or None.
      positions: the sinusoids of a byte's place in patch and document.
      bridge_heads: heads of both cross-attentions.
      bridge_pattern: the patches that a byte reads, by their distance from its latest one. "latest" are the look_back
        nearest. "dilated" are those at 0, 1, 2, 4, 8, ... below look_back. "local_global" are the 64 nearest and every
        64th below look_back. In a bidirectional model the last two reach as far ahead.
      bridge_chunk: patch blocks that both cross-attentions take at a time, which bounds their memory; of blocks that do
        not divide by it fewer. None takes all at once.
      look_back: closed patches that a byte sees, at least 2; those of a pattern that lie as near.
      features_enter: where the sinusoids of `positions` are added, at the encoder's input or at its output. With
        "output" the encoder knows nothing of patches, so that they can be cut by what it finds.
      router: scores boundaries for a patcher of mode "learned"; None for another.
      level: groups patches again, so that the latent stack runs over groups; None for patches alone.
      tie_head: read logits off the byte embedding.
      vocab_size: ids.
    """

    encoder: StackConfig = StackConfig(dim=256, num_layers=1, pattern="W")
    latent: StackConfig = StackConfig(dim=384, num_layers=4, pattern="HHAH")
    decoder: StackConfig = StackConfig(dim=256, num_layers=2, pattern="W")
    hash: HashConfig | None = HashConfig()
    positions: PositionConfig = PositionConfig()
    bridge_heads: int = 4
    bridge_pattern: Pattern = "latest"
    bridge_chunk: int | None = None
    look_back: int = 4
    features_enter: Literal["input", "output"] = "input"
    router: BoundaryConfig | None = None
    level: LevelConfig | None = None
    tie_head: bool = True
    vocab_size: int = VOCAB_SIZE

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "look_back", least=2, why=": over one patch a softmax is constant")
        check_bounds(self, "bridge_heads", "bridge_chunk", least=1)
        check_vocab_size(self)
        if self.encoder.dim != self.decoder.dim:
            raise ValueError(
                f"encoder and decoder share the bytes' width, got {self.encoder.dim} and {self.decoder.dim}"
            )
        if len({self.encoder.causal, self.latent.causal, self.decoder.causal}) > 1:
            raise ValueError("encoder, latent and decoder must be causal together, or bidirectional together")
        if any(x.layout != CONTIGUOUS for x in (self.encoder, self.latent, self.decoder)):
            raise ValueError(
                "patches are made of bytes in order: use attention.layout='contiguous' in all stacks"
            )
        if self.encoder.dim % self.bridge_heads:
            raise ValueError(
                f"encoder.dim = {self.encoder.dim} does not divide among bridge_heads = {self.bridge_heads}"
            )
        self._check_router()
        if self.level is not None and not self.causal:
            raise ValueError(
                "a level cuts by slots up to its own, and the stacks see the future: use causal ones"
            )

    def _check_router(self) -> None:
        """Check that a router reads nothing of patches or of the future, and that the un-merge reads its options."""
        if self.router is None:
            return
        gathers = self.router.unmerge == "gather"
        check_read(self, "bridge_pattern", needed="router.unmerge='attention'", is_read=not gathers)
        if self.features_enter != "output":
            raise ValueError(
                "a router cuts by what the encoder finds, which must then know nothing of patches: set "
                f"features_enter='output', got {self.features_enter!r}"
            )
        if not self.causal:
            raise ValueError(
                "a router cuts by bytes up to its own, and the stacks see the future: use causal ones"
            )

    @property
    def causal(self) -> bool:
        """True if position t sees nothing after t."""
        return self.latent.causal

    @property
    def slot_dim(self) -> int:
        """Width of the patches."""
        return self.latent.dim if self.level is None else self.level.encoder.dim

    @abstractmethod
    def build(self, *, dtype: Any, patcher: PatcherConfig | None, name: str | None) -> Any:
        """Build the module."""

    @property
    def read_distances(self) -> tuple[int, ...] | None:
        """Distances of the patches that a byte reads, from its latest one; None for all below look_back."""
        return read_distances(self.bridge_pattern, self.look_back, causal=self.causal)

    @property
    def embedding(self) -> EmbeddingConfig:
        """The config of the byte embedding."""
        return EmbeddingConfig(dim=self.encoder.dim, hash=self.hash, vocab_size=self.vocab_size)

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "BLTOptions":
        """Return the config for rows in which documents lie as said: in bytes, and in latent slots."""
        if self.level is None:
            return dataclasses.replace(promise(self, of_bytes), latent=promise(self.latent, of_slots))
        # Groups promise nothing of where documents start: their number in a block is not known here
        of_groups = RowLayout(packed=of_slots.packed)
        parts = {"latent": promise(self.latent, of_groups), "level": promise(self.level, of_slots)}
        return dataclasses.replace(promise(self, of_bytes), **parts)

    def check_patcher(self, patcher: PatcherConfig) -> None:
        """Check that patcher and router fit together.

        Raises:
          TypeError: it is no `PatcherConfig`.
          ValueError: only one of patcher and router is of learned boundaries, or only one of entropies.
        """
        check_kind("patcher", patcher, PatcherConfig, fix="make one, such as PatcherConfig(mode='space')")
        if (patcher.mode == "learned") != (self.router is not None):
            raise ValueError(
                f"patcher mode {patcher.mode!r} and model.router {self.router} do not fit: mode 'learned' and a "
                "BoundaryConfig go together"
            )
        if self.router is not None and patcher.reads_entropies != self.router.reads_entropies:
            raise ValueError(
                f"patcher.reads_entropies is {patcher.reads_entropies}, and the router's strategy "
                f"{self.router.strategy!r} says otherwise: set it to {self.router.reads_entropies}"
            )
