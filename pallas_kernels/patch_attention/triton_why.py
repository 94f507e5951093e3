"""The calls that the Triton kernels take, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_triton_on

HEAD = 64
"""Size of a head."""

FARTHEST = 8
"""Patches to look back at; each adds a comparison to every score."""


def why_not(
    device: Device,
    q: Any = None,
    *_: Any,
    look_back: int = 1,
    distances: tuple[int, ...] | None = None,
) -> str | None:
    """Return why the kernels cannot run such a call, or None.

    Without arrays: why not on the device.
    """
    if (reason := why_not_triton_on(device)) is not None:
        return reason
    if q is not None and str(q.dtype) != "bfloat16":
        return f"its products are bf16, q, k and v are {q.dtype}"
    if q is not None and q.shape[-1] != HEAD:
        return f"its heads are of size {HEAD}, not {q.shape[-1]}"
    if look_back > FARTHEST:
        return f"it looks back at {FARTHEST} patches at most, not {look_back}"
    if distances is not None:
        return "it reads the latest patches, and none at distances of a pattern"
    return None
