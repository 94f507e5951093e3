"""The calls that the Triton kernel of `prefix_attention` takes, known without importing Pallas' GPU dialect."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_triton_on

HEADS = (16, 32, 64, 128)
"""Sizes of a head."""

CACHES = ("bfloat16", "float16", "float32")
"""Types of keys and values: Pallas' Triton loads no FP8 under a mask."""

MOST_ROWS = 64
"""The most queries of a row that share a key head: a program holds scores and outputs of all."""


def why_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    counts: Any,
    times: Any,
    *,
    scale: Any = None,
    cast_output: bool = False,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_triton_on(device)) is not None:
        return reason
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"its products are in bfloat16 or float16, q is {q.dtype}"
    if str(k.dtype) not in CACHES:
        return f"it reads caches in {', '.join(CACHES)}, not {k.dtype}"
    if q.shape[3] not in HEADS:
        return f"its heads are of size {', '.join(map(str, HEADS))}, not {q.shape[3]}"
    if 0 in (*q.shape, *k.shape):
        return f"it takes one query and one key at least, these are {q.shape} and {k.shape}"
    shared = q.shape[1] * q.shape[2] // k.shape[2]
    if shared > MOST_ROWS:
        return f"{MOST_ROWS} queries may share a key head, these are {shared}"
    return None
