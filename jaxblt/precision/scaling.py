"""What a train step in low precision remembers: the amax histories of FP8 and the scale of fp16's loss."""

from typing import Any

import jax
import numpy as np

AMAX, LOSS = "amax", "loss"
"""The parts of `TrainState.scaling`."""


def check_scales(scaling: Any) -> None:
    """Check that what a checkpoint remembers is finite.

    Raises:
      ValueError: a number is not, or is below 0; names it.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(scaling):
        values = np.asarray(leaf)
        wrong = values[~(np.isfinite(values) & (values >= 0))]
        if wrong.size:
            raise ValueError(
                f"scaling{jax.tree_util.keystr(path)} of the checkpoint holds {wrong.flat[0]}, and a scale is made of "
                "finite numbers from 0: go on from an earlier step"
            )
