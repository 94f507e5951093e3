"""What the Hopper kernel of partial attention takes, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_on
from pallas_kernels.attention import cudnn
from pallas_kernels.attention.masks import Mask

ROWS = 64
"""Queries of a warpgroup: the rows of its matrix products."""

TILE = 128
"""Queries of a program, which has two warpgroups that compute, and keys of a step."""

HEADS = (64, 128)
"""Sizes of a head."""


def why_not(device: Device, q: Any, k: Any, v: Any, mask: Mask, *, scale: Any = None) -> str | None:
    """Return why the kernel cannot run this, or None."""
    if (reason := why_not_on(device)) is not None:
        return reason
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16 alone, not {q.dtype}"
    if q.shape[-1] not in HEADS:
        return f"its heads are of size {HEADS[0]} or {HEADS[1]}, not {q.shape[-1]}"
    if 0 in (*q.shape, *k.shape):
        return f"it takes one query and one key at least, these are {q.shape} and {k.shape}"
    others = (mask.interval.window, mask.segments, mask.positions, mask.q_lengths, mask.rule)
    if any(x is not None for x in others) or not mask.interval.is_plain:
        return "it has causal masks and lengths of keys alone"
    if scale is not None and scale <= 0:
        return f"it takes positive scales alone, not {scale}"
    return None


def rather_not(device: Device, q: Any, k: Any, v: Any, mask: Mask, *, scale: Any = None) -> str | None:
    """Return why cuDNN goes first, as it was faster or this kernel was not timed, or None."""
    if cudnn.why_not_partial(device, q, k, v, mask, scale=scale) is not None:
        return None
    if q.shape[-1] != HEADS[1]:
        return f"with heads of {q.shape[-1]} cuDNN's kernel is faster"
    if str(q.dtype) != "bfloat16":
        return f"it was timed with bfloat16 alone, not {q.dtype}"
    if mask.kv_lengths is not None and q.shape[0] == k.shape[0]:
        return "with lengths of keys it was not timed"
    return None
