"""The share of cuts that lie at the edges of words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

if TYPE_CHECKING:
    from jaxblt.data.dataset import Dataset
    from jaxblt.patching.patches import Patches
    from jaxblt.training.start.setup import Setup
    from jaxblt.training.state import TrainState


@dataclass(frozen=True)
class Passage:
    """Rows of text as a model cuts them.

    Attributes:
      ids: of the bytes.
      segment_ids: of the bytes.
      patches: of the model.
    """

    ids: Int[np.ndarray, "B T"]
    segment_ids: Int[np.ndarray, "B T"]
    patches: "Patches"

    @property
    def cuts(self) -> Bool[np.ndarray, "B T"]:
        """True where a patch ends."""
        return np.asarray(self.patches.closed).reshape(len(self.ids), -1)[:, : self.ids.shape[1]]

    def text(self, most: int) -> str:
        """Return the first row's beginning with its patches."""
        from jaxblt.patching import render_patches

        return render_patches(self.ids[0], self.patches)[:most]


def cut_passages(setup: "Setup", data: "Dataset", states: Sequence["TrainState"]) -> list[Passage]:
    """Return the first rows of a split as each model cuts them; call it with the mesh set."""
    import jax

    from jaxblt.training.start.setup import to_devices
    from jaxblt.training.step import predict

    rows = data.batch(0)
    batch = to_devices(rows, setup.mesh, setup.recipe.data.batch_size, setup.layout)
    cut: Any = jax.jit(
        lambda state, batch: predict(setup.eval_task, state.params, state.frozen, batch, {})[1]
    )
    ids, segments = np.asarray(rows.inputs), np.asarray(rows.segment_ids)
    return [Passage(ids, segments, jax.device_get(cut(state, batch))) for state in states]


def shares_at_words(passage: Passage) -> dict[str, float]:
    """Return shares of cuts behind a word's last letter and before its first, beside those of all bytes."""
    word, real = in_word(passage.ids), passage.segment_ids > 0
    after = np.pad(word[:, 1:], ((0, 0), (0, 1)))
    cuts = passage.cuts & real
    marks = {"word_ends": word & ~after, "before_words": ~word & after}
    found = {name: float(mark[cuts].mean()) for name, mark in marks.items()}
    return found | {f"{name}_of_all": float(mark[real].mean()) for name, mark in marks.items()}


def in_word(ids: Int[np.ndarray, "B T"]) -> Bool[np.ndarray, "B T"]:
    """Return True for ASCII letters and digits, and bytes of other characters."""
    from jaxblt.data.vocab import OFFSET

    table = np.array([byte >= 0x80 or chr(byte).isalnum() for byte in range(256)])
    return np.where(ids < OFFSET, False, table[np.maximum(ids - OFFSET, 0)])
