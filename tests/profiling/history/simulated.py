"""Records of a simulated clock: normal trials around known seconds, and runs that vary among each other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pallas_kernels.runtime import median_interval

MACHINE = {"platform": "gpu", "kind": "NVIDIA H200", "count": 1}


def draw_record(
    draw: np.random.Generator,
    seconds: Mapping[str, float],
    *,
    noise: float = 0.01,
    between: float = 0.0,
    trials: int = 20,
    minute: int = 0,
    **origin: Any,
) -> dict[str, Any]:
    """Return a record whose trials vary by `noise`, and whose run varies by `between`, as shares."""
    shift = 1 + between * draw.standard_normal()
    found = {name: _time(draw, value * shift, noise, trials) for name, value in seconds.items()}
    where = {
        "devices": MACHINE,
        "time": f"2026-01-01T00:{minute:02}:00Z",
        "git": {"commit": f"{minute:040x}"},
    }
    return {"benchmark": "stack", "times": found, **where, **origin}


def _time(draw: np.random.Generator, value: float, noise: float, trials: int) -> dict[str, Any]:
    samples = value * (1 + noise * draw.standard_normal(trials))
    low, high = median_interval(samples)
    return {"median": float(np.median(samples)), "low": float(low), "high": float(high), "trials": trials}
