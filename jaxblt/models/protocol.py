"""The interface of language models to training, decoding and evaluation, which never ask which one it is."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.models.row_layout import RowLayout
from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.patches import Patches


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass that describes a language model."""

    @property
    def causal(self) -> bool: ...

    @property
    def vocab_size(self) -> int: ...

    def in_rows(self, of_bytes: RowLayout, of_slots: RowLayout) -> "ModelConfig":
        """Return the config for rows in which documents lie as said: in bytes, and in slots."""
        ...

    def build(self, *, dtype: Any = jnp.float32, patcher: PatcherConfig | None = None) -> "LanguageModel":
        """Build the module; parameters are fp32, computation in `dtype`, logits in fp32.

        Raises:
          ValueError: the model has no patches, and there is a patcher.
        """
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A Linen module that predicts ids. It decides itself where patches close, if it has any.

    A model that is to be fine-tuned on labels also has `hidden`. It takes the arguments of `__call__`, and returns the
    states [B, T, D] from which the head makes logits, and the patches.

    `__call__`, `prefill`, `stream` and `step` go through `apply` with the same parameters and agree within the
    tolerances.

    Attributes:
      patcher: the rule that closes patches; None for a model without.
      grid: every `prefill` of a document but its last is of a multiple of so many bytes, and no `stream` goes beyond
        such a multiple.
    """

    @property
    def patcher(self) -> PatcherConfig | None: ...

    @property
    def grid(self) -> int: ...

    def apply(self, variables: Any, *args: Any, **options: Any) -> Any:
        """Apply the module as Linen does."""
        ...

    def __call__(
        self,
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        entropies: Float[Array, "B T"] | None = None,
        patches: Patches | None = None,
    ) -> tuple[Float[Array, "B T V"], Patches | None]:
        """Return logits in fp32, and the patches that they used.

        Args:
          ids: byte ids.
          segment_ids: documents, 0 for padding; None for one document a row.
          positions: offset in the document; None counts each document.
          entropies: nats, of an entropy model's prediction at each byte, for a patcher that reads them.
          patches: to use instead of the model's own decision.
        """
        ...

    def init_state(self, batch_size: int, *, num_bytes: int) -> Any:
        """Return the state before the first byte, for documents of at most `num_bytes` bytes.

        It needs no parameters.

        Raises:
          ValueError: the model or its patcher sees the future.
        """
        ...

    def prefill(
        self,
        ids: Int[Array, "B T"],
        state: Any,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B V"], Any]:
        """Return logits after each row's last byte, and the state that `step` would have left.

        Args:
          ids: the next bytes of each row.
          state: of `init_state`, or after calls of whole multiples of `grid`.
          segment_ids: one document a row, with 0s behind its bytes; a row of 0s keeps its state, and its logits mean
            nothing.
          entropies: as for `__call__`.
        """
        ...

    def step(
        self,
        ids: Int[Array, "B"],
        state: Any,
        *,
        segment_ids: Int[Array, "B"] | None = None,
        entropies: Float[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B V"], Bool[Array, "B"], Any]:
        """Return logits of the byte after each row's next byte, and the state after that byte.

        Between them stands whether a patch closed with it.

        Args:
          ids: the next byte of each row.
          state: of `init_state`, `prefill` or the step before.
          segment_ids: document of each byte; 0 leaves the row as it was. None continues each row's document.
          entropies: as for `__call__`.
        """
        ...

    def stream(
        self,
        ids: Int[Array, "B T"],
        state: Any,
        *,
        segment_ids: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Any]:
        """Return logits of the next bytes of each row, and the state that `step` would have left.

        Args:
          ids: the next bytes of each row.
          state: of `init_state`, `prefill`, `step` or here, at any byte.
          segment_ids: one document a row, with 0s behind its bytes; a row of 0s keeps its state. No row goes beyond a
            multiple of `grid`.
          entropies: as for `__call__`.
        """
        ...

    def boundaries(self, state: Any) -> tuple[Int[Array, "B"], Int[Array, "B"]] | None:
        """Count patch boundaries refused for want of slots, and those asked for, or return None.

        Both are of each row's document so far.
        """
        ...
