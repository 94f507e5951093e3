"""Seconds of a call over several devices, by the host's clock.

A short call's are the slope between m and 2m calls in a row, waited for once; a long one's are the wall clock.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

LONG = 0.3
"""Seconds from which a call is timed by itself."""

SLOPE_SECONDS = 0.05
TRIALS = 10


def seconds(step: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Median, extremes, number and method of the trials."""
    import jax

    # Virtual CPU devices share a few threads: exchanges of two calls at once can wait for each other for ever.
    one_by_one = jax.default_backend() == "cpu"

    def calls(count: int) -> float:
        start = time.perf_counter()
        for turn in range(count):
            result = step(*args)
            if one_by_one or turn == count - 1:
                jax.block_until_ready(result)
        return time.perf_counter() - start

    taken = calls(1)
    if taken < LONG:
        taken = calls(1)
        count = max(1, round(SLOPE_SECONDS / taken))
        trials = [(calls(2 * count) - calls(count)) / count for _ in range(TRIALS)]
    else:
        trials = [taken] if taken > 20 * LONG else [calls(1) for _ in range(3)]
    return {
        "median": float(np.median(trials)),
        "least": min(trials),
        "most": max(trials),
        "trials": len(trials),
        "method": "slope" if taken < LONG else "wall",
    }
