"""Sheets of images with a row for each class, as PNG files that a human checks labels on."""

import struct
import zlib

import numpy as np

from jaxblt.data.examples import Examples
from jaxblt.data.vocab import OFFSET
from jaxblt.validation import whole

FRAME = 90
"""Grey level of the lines between images."""
MOST_SEARCHED = 10_000
"""Examples that are looked through for enough of each class."""


def draw_sheet(examples: Examples, classes: int, *, columns: int = 8, scale: int = 4) -> bytes:
    """Return a PNG of the first images of each class: row k of the sheet shows class k.

    Args:
      examples: rows of the pixels of squares, such as `Pathfinder().open("test")`.
      classes: rows of the sheet.
      columns: images of a class; places stay black where there are too few.
      scale: pixels of the sheet for a pixel of an image, each way.

    Raises:
      ValueError: rows are not of squares, or a size is below 1.
    """
    whole("columns", columns, least=1)
    whole("scale", scale, least=1)
    rows: list[list[np.ndarray]] = [[] for _ in range(classes)]
    count = MOST_SEARCHED if examples.count is None else min(examples.count, MOST_SEARCHED)
    for number in range(count):
        inputs, targets, _ = examples.example(number)
        row = rows[int(targets[-1]) - OFFSET]
        if len(row) < columns:
            row.append(_as_square(inputs))
        elif all(len(row) == columns for row in rows):
            break
    side = max(len(image) for row in rows for image in row)
    sheet = np.full((classes * (side + 1) + 1, columns * (side + 1) + 1), FRAME, np.uint8)
    for y in range(classes):
        for x in range(columns):
            image = rows[y][x] if x < len(rows[y]) else np.zeros((side, side), np.uint8)
            top, left = y * (side + 1) + 1, x * (side + 1) + 1
            sheet[top : top + side, left : left + side] = image
    return write_png(sheet.repeat(scale, 0).repeat(scale, 1))


def _as_square(ids: np.ndarray) -> np.ndarray:
    side = round(len(ids) ** 0.5)
    if side * side != len(ids):
        raise ValueError(
            f"a row of {len(ids)} pixels is no square: draw a task of images, such as Pathfinder()"
        )
    return (ids - OFFSET).astype(np.uint8).reshape(side, side)


def write_png(pixels: np.ndarray) -> bytes:
    """Return UInt8[height, width] grey levels as the bytes of a PNG file."""
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # a line begins with its filter, 0 for none
    lines[:, 1:] = pixels
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
