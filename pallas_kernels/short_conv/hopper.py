"""The calls that the Hopper kernel takes, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import CHUNK, why_not_streams

STEPS = 4096
"""Time steps per tile."""

FULL = 8 * CHUNK
"""The number that rows have to be a multiple of."""

MOST = 8
"""Taps that a tile's threads sum without running short of registers, and more than the op is meant for."""


def why_not(
    device: Device,
    x: Any,
    taps: Any,
    *,
    segment_ids: Any = None,
    history: Any = None,
    pre_gate: Any = None,
    post_gate: Any = None,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if refused := why_not_streams(device, x, pre_gate, post_gate):
        return refused
    if segment_ids is not None:
        return "it does not know packed rows"
    if history is not None:
        return "it starts from a zero history"
    if taps.shape[1] > MOST:
        return f"it takes at most {MOST} taps, not {taps.shape[1]}"
    if x.shape[2] < STEPS:
        return f"rows are shorter than one tile of {STEPS} steps"
    if x.shape[2] % FULL:
        return f"rows of {x.shape[2]} steps, no multiple of {FULL}, would be copied into longer ones"
    return None
