"""The face of models that read bytes through patches: whole rows, and the rule that closes patches."""

from abc import ABC, abstractmethod
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from jaxblt.patching import PatcherConfig
from jaxblt.patching.patches import Patches


class BytePatched(nn.Module, ABC):
    """A model with `patcher`, `embedding` and `head`, whose `_decoded` makes the byte vectors that the head reads."""

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: Float[Array, "B T"] | None = None,
        patches: Patches | None = None,
    ) -> tuple[Float[Array, "B T V"], Patches]:
        """Return logits in fp32, and the patches that they used.

        Args:
          ids: byte ids.
          segment_ids: documents, 0 for padding; None for one document a row.
          positions: offset in the document; None counts each document.
          entropies: nats, of an entropy model's prediction at each byte, for a patcher that reads them.
          patches: how the bytes are grouped, instead of the patcher's decision; from a causal patcher if the model is
            to generate.

        Raises:
          ValueError: there is neither a patcher nor patches, or the patcher's entropies are missing.
          ValueError: the patches are of other rows or documents.
          ValueError: the mesh does not suit the model.
        """
        x, patches = self._decoded(ids, segment_ids, positions, entropies, patches)
        return self.head(x, self.embedding), patches

    def hidden(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: Float[Array, "B T"] | None = None,
        patches: Patches | None = None,
    ) -> tuple[Float[Array, "B T C"], Patches]:
        """Return what the head reads logits off, for another head, and the patches.

        Arguments are those of `__call__`.
        """
        x, patches = self._decoded(ids, segment_ids, positions, entropies, patches)
        return self.head.states(x), patches

    @abstractmethod
    def _decoded(
        self, ids: Int[Array, "B T"], segment_ids: Any, positions: Any, entropies: Any, patches: Any
    ) -> tuple[Float[Array, "B T C"], Patches]:
        """Return byte vectors behind the decoder, and the patches that they used."""

    @nn.nowrap
    def _rule(self) -> PatcherConfig:
        if self.patcher is None:
            raise ValueError(
                "a byte-patched model needs the patcher that it was trained with, or patches: give build() a patcher"
            )
        return self.patcher

    @nn.nowrap
    def boundaries(self, state: Any) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Count boundaries that were refused for want of slots, and those asked for.

        Both are of each row's document so far.
        """
        return state.patcher.overflow, state.patcher.wanted
