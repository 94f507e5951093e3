"""What the Hopper kernel takes, known without importing Pallas' GPU dialect, which takes over a second."""

import math
from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_on

STEP = 64
"""What is summed over at a time: 128 bytes of bf16, the width of a swizzled tile."""

LARGEST = 2**31
"""The kernel counts elements in 32 bits."""


def why_not(device: Device, x: Any, w: Any, v: Any, u: Any, code: Any = None, **_: Any) -> str | None:
    """Why the kernel cannot run such a call, or None."""
    del u, code
    if (reason := why_not_on(device)) is not None:
        return reason
    if str(x.dtype) != "bfloat16":
        return f"it takes bf16 tokens, x is {x.dtype}"
    if w is None:
        return "it adds the update to x W in registers, and without w there is nothing to add it to"
    matrices = w if isinstance(w, tuple) else (w,)
    for size in (x.shape[-1], *(matrix.shape[-1] for matrix in matrices)):
        if size % STEP or not size:
            return f"its tiles are {STEP} wide, and a width of {size} is no multiple"
    rows = math.prod(x.shape[:-1])
    if not rows:
        return f"it takes one token at least, x is {x.shape}"
    if rows * max(x.shape[-1], *(matrix.shape[-1] for matrix in matrices)) >= LARGEST:
        return f"it counts elements in 32 bits, x is {x.shape} and a site has {matrices[0].shape[-1]} outputs"
    return None


def rather_not(device: Device, *args: Any, **options: Any) -> str | None:
    """Why the kernel is taken by name only."""
    del device, args, options
    return "it has not been timed on an H200"
