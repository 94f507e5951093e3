"""Images as rows of bytes: pixels from left to right and from top to bottom, and the label behind the last one."""

import numpy as np

from jaxblt.data.examples import Example
from jaxblt.data.tasks.generated import ids

MOST_SIDE = 1024
"""Pixels of the longest side: a row of a square has as many as a million bytes."""


def raster_row(pixels: np.ndarray, label: int) -> Example:
    """Return the bytes of UInt8[height, width] pixels as a row that answers with symbol `label` behind the last.

    There is no BOS and no EOS: a row of 32 x 32 pixels has 1,024 positions, and pixel (y, x) stands at 32 y + x.
    """
    inputs = ids(pixels.reshape(-1))
    targets = np.append(inputs[1:], ids(np.array([label])))
    scored = np.zeros(len(inputs), bool)
    scored[-1] = True
    return Example(inputs, targets, scored)
