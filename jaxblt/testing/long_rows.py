"""Properties of rows longer than a kernel's block."""

import numpy as np

from jaxblt.testing import numerics, parallel
from jaxblt.testing.subject import LONG, Subject, expect_close

CALL = 100


def check_long(subject: Subject) -> None:
    """Check rows of `LONG` tokens as short ones, and against calls.

    Gradients, mixing, documents and causality are checked.
    """
    long = subject.long
    numerics.check_whole_gradient(long)
    parallel.check_packed(long)
    parallel.check_mixes(long)
    if not long.config.causal:
        return
    parallel.check_causal(long, cuts=(LONG // 2 - 1, LONG - 44, LONG - 1))
    ids = np.ones((long.rows, long.length), np.int32)
    fed = long.feed(long.x, ids, [CALL] * -(-long.length // CALL))
    expect_close(f"calls of {CALL} differ from the training pass", fed, long.run(), long.limit)
