"""The calls that the Hopper kernels take and the cut of rows, known without importing Pallas' GPU dialect (over a
second).
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import why_not_on

LANES = 128
"""Columns of a program: one a thread of a warpgroup."""

STEPS = 16
"""Time steps of a tile: 8 KB of fp32."""

FULL = 40
"""The programs from which on a row is walked from end to end; with fewer it is cut into pieces. On an H200 whole rows
took 1.25 times the floor forward with 64 programs and 2.6 with 20, pieces 1.9.
"""

WANTED = 264
"""Programs that a cut is to make: two on each of an H200's 132 multiprocessors."""

SHORTEST = 8
"""Tiles of the shortest piece: a piece costs a second read of its factors and inputs."""


@dataclass(frozen=True)
class Grid:
    """The layout of a scan of S rows of T steps and D columns on programs.

    Attributes:
      rows: rows of a program, more than one only if a row is narrower than 128 columns.
      columns: columns of a program, 128 / rows.
      tiles: tiles of a piece.
      pieces: pieces of a row; the last may be shorter.
    """

    rows: int
    columns: int
    tiles: int
    pieces: int


def lay_out(rows: int, length: int, width: int, pieces: int | None = None) -> Grid:
    """Return the grid for streams [rows, length, width].

    `pieces` replaces the number that fills an H200.
    """
    columns = width if width < LANES and LANES % width == 0 else LANES
    together = LANES // columns
    tiles = -(-length // STEPS)
    if pieces is None:
        programs = -(-rows // together) * -(-width // columns)
        pieces = 1 if programs >= FULL else max(1, min(-(-WANTED // programs), tiles // SHORTEST))
    each = -(-tiles // pieces)
    return Grid(rows=together, columns=columns, tiles=each, pieces=-(-tiles // each))


def why_not(device: Device, a: Any, b: Any, **_: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if (reason := why_not_on(device)) is not None:
        return reason
    for name, array in (("a", a), ("b", b)):
        if str(array.dtype) not in ("bfloat16", "float32"):
            return f"it takes bf16 and fp32 streams, {name} is {array.dtype}"
        if a.shape[-1] * jnp.dtype(array.dtype).itemsize % 16:
            return f"the copy engine takes rows of a multiple of 16 bytes, {a.shape[-1]} columns of {name} are none"
    if math.prod(b.shape) >= 2**31:
        return f"it counts elements in 32 bits, b has {math.prod(b.shape)}"
    return None


def rather_not(device: Device, a: Any, b: Any, **_: Any) -> str | None:
    """Return why a call of few steps or columns, as in decoding, is left to others, or None."""
    del device, a
    length, width = b.shape[-2:]
    if length < STEPS:
        return f"a tile has {STEPS} steps, b has {length}"
    return f"rows of {width} columns, fewer than {LANES}, have not been timed" if width < LANES else None
