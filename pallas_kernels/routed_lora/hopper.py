"""The calls that the Hopper kernel takes, known without importing Pallas' GPU dialect (over a second)."""

import math
from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_on

STEP = 64
"""The numbers summed over at a time: 128 bytes of bf16, the width of a swizzled tile."""

TILE = 256
"""Rows and columns of a tile: smaller arrays than what is copied at a time came back as zeros on an H200."""

UNIT = 16
"""Ranks that share a number where blocks are skipped: blocks are multiples of it."""

LARGEST = 2**31
"""The kernel counts elements in 32 bits."""

TIMED_TOKENS, TIMED_WIDTH = 16_384, 1024
"""The fewest that were timed on an H200, where the kernel was faster."""


def why_not(
    device: Device,
    x: Any,
    w: Any,
    v: Any,
    u: Any,
    code: Any = None,
    *,
    active: Any = None,
    channels_first: bool = False,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    del u
    if (reason := why_not_on(device)) is not None:
        return reason
    if str(x.dtype) != "bfloat16":
        return f"it takes bf16 tokens, x is {x.dtype}"
    if w is None:
        return "it adds the update to x W in registers, and without w there is nothing to add it to"
    widths = _widths(x, w)
    for size in widths:
        if size % STEP or not size:
            return f"its steps are {STEP} wide, and a width of {size} is no multiple"
    if min(widths) < TILE:
        return f"its tiles are {TILE} wide, and a width is {min(widths)}"
    tokens = math.prod(x.shape[:-1])
    if tokens < TILE:
        return f"its tiles have {TILE} tokens, x has {tokens}"
    if max(tokens * max(widths), widths[0] * max(widths[1:])) >= LARGEST:
        return f"it counts elements in 32 bits, x is {x.shape} and the largest width {max(widths)}"
    if channels_first and (reason := _why_no_rows(x.shape[1], active)) is not None:
        return reason
    if active is None:
        return None
    blocks = {site.shape[1] // code.shape[-1] for site in v}
    if odd := sorted(size for size in blocks if size % UNIT):
        return f"it skips blocks of multiples of {UNIT} ranks, and one has {odd[0]}: leave active out"
    return None


def _why_no_rows(length: int, active: Any) -> str | None:
    """Return why the kernel cannot make tiles of tokens of one row each, or None."""
    if length < TILE:
        return f"with channels first its tiles have {TILE} tokens of one row, and a row has {length}"
    whole = STEP if active is None else TILE
    if length % whole:
        what = "stores" if active is None else "lists of active blocks"
        return f"with channels first its {what} are of {whole} tokens of one row, and {length} is no multiple"
    return None


def rather_not(device: Device, x: Any, w: Any, *args: Any, **options: Any) -> str | None:
    """Return why the kernel, though it can run such a call, is taken by name only, or None."""
    del device, args, options
    tokens, width = math.prod(x.shape[:-1]), min(_widths(x, w))
    if tokens < TIMED_TOKENS:
        return f"it has not been timed with fewer than {TIMED_TOKENS} tokens, x has {tokens}"
    if width < TIMED_WIDTH:
        return f"it has not been timed with widths below {TIMED_WIDTH}, one is {width}"
    return None


def _widths(x: Any, w: Any) -> tuple[int, ...]:
    """Return K, and N of each site."""
    return x.shape[-1], *(site.shape[-1] for site in (w if isinstance(w, tuple) else (w,)))
