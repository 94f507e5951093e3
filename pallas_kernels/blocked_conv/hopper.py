"""The calls that the Hopper kernel takes, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import CHUNK, ROWS, is_in_whole_boxes, why_not_streams

REACH = 2
"""Chunks back that a filter may look."""

LAGS = tuple(range(REACH + 1))
LONGEST = CHUNK * REACH + 1
TILE = CHUNK * ROWS


def is_read_flat(length: int, *, packed: bool) -> bool:
    """Return whether rows of this length are read where they lie, though they share chunks.

    See `_conv.flat_rows`.
    """
    return not packed and not is_in_whole_boxes(length)


def why_not(
    device: Device,
    x: Any,
    filter: Any,
    *,
    pre_gate: Any = None,
    post_gate: Any = None,
    causal: bool = True,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if refused := why_not_streams(device, x, pre_gate, post_gate):
        return refused
    if not causal:
        return "it does not look ahead"
    if filter.shape[1] > LONGEST:
        return f"it takes at most {LONGEST} taps, not {filter.shape[1]}"
    if x.shape[2] < TILE:
        return f"rows are shorter than one tile of {TILE} steps"
    return None
