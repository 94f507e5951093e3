"""The calls that the Hopper kernels take, known without importing Pallas' GPU dialect (over a second)."""

from typing import Any

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_streams

ROWS = 64
"""Tokens of a warpgroup: the rows of its matrix products."""
WORKERS = 2
"""Warpgroups of a program that compute."""
PAIR = 2
"""Programs of a cluster: each reads half of what both need."""
TOKENS = PAIR * WORKERS * ROWS
"""Tokens of a cluster that reads."""
TILING = 8
"""Tokens of a tile in shared memory, of which a chunk is a whole number."""
BLOCK = 128
"""Hidden units of a step of reads, and of a cluster that makes gradients."""
WIDTHS = (128, 256)
"""Sizes of a head: sums of 256 columns take 128 registers of each thread."""
LARGEST = 2**31
"""The kernels count elements in 32 bits."""
TIMED_WIDTH, TIMED_CHUNK = 256, 512
"""Size of a head, and the shortest chunk, at which they were timed, and faster forward (neural_memory.json)."""


def why_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    theta: Any,
    eta: Any,
    alpha: Any,
    weights: Any,
    *,
    chunk_size: int = 512,
    **_: Any,
) -> str | None:
    """Return why the kernels cannot run such a call, or None."""
    del theta, eta, alpha
    if (reason := why_not_streams(device, q, k, v)) is not None:
        return reason
    if len(weights) != 2:
        return "it has memories of two matrices alone, this one has one matrix a head"
    rows, length, heads, width = v.shape
    hidden = weights[0].shape[-1]
    if width not in WIDTHS:
        return f"its heads are of size {WIDTHS[0]} or {WIDTHS[1]}, not {width}"
    if hidden % BLOCK or not hidden:
        return f"it takes {BLOCK} hidden units at a time, {hidden} is no multiple"
    chunk = min(chunk_size, length)
    if chunk < TOKENS:
        return f"it reads {TOKENS} tokens of a chunk at a time, these have {chunk}"
    if chunk % TILING:
        return f"its chunks are multiples of {TILING} tokens, these have {chunk}"
    windows = -(-length // chunk)
    # Count whole chunks: streams are filled up to them, and each chunk has weights of its own.
    if windows * rows * heads * width * max(chunk, hidden) >= LARGEST:
        return (
            f"it counts elements in 32 bits, v is {v.shape} and there are {windows} chunks of {chunk} tokens "
            f"and {hidden} units"
        )
    return None


def rather_not(
    device: Device, q: Any, k: Any, v: Any, *others: Any, chunk_size: int = 512, **_: Any
) -> str | None:
    """Return why a call that the kernels can run is left to XLA, or None.

    Even where no derivative is taken.
    """
    del device, q, k, others
    length, width = v.shape[1], v.shape[3]
    chunk = min(chunk_size, length)
    if width != TIMED_WIDTH or chunk < TIMED_CHUNK:
        return (
            f"it was timed with heads of {TIMED_WIDTH} and chunks of {TIMED_CHUNK} tokens or more, these have "
            f"{width} and {chunk}"
        )
    return None
