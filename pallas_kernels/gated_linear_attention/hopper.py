"""What the Hopper kernels take, known without importing Pallas' GPU dialect, which takes over a second."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_streams

WIDTHS = (64, 128)
"""Key channels of a head."""

PIECE = 64
"""Steps of a chunk, and channels of a tile: 128 bytes of bf16."""


def why_not(device: Device, q: Any, k: Any, v: Any, **_: Any) -> str | None:
    """Why the kernels are not to run such a call, or None."""
    if refused := why_not_streams(device, q, k, v):
        return refused
    if k.shape[3] not in WIDTHS:
        return f"its keys are {WIDTHS[0]} or {WIDTHS[1]} wide, not {k.shape[3]}"
    if v.shape[3] % PIECE:
        return f"its values are a multiple of {PIECE} wide, not {v.shape[3]}"
    return None


def rather_not(device: Device, q: Any, k: Any, v: Any, **_: Any) -> str | None:
    """Why a row of a few steps, as in decoding, is left to others, or None."""
    del device, q, k
    return f"rows of {v.shape[1]} steps would be filled up to {PIECE}" if v.shape[1] < PIECE else None
