"""Pictures of masks: a square for each pair of tokens, queries down and keys across, as SVG."""

from collections.abc import Mapping
from html import escape

import numpy as np
from jaxtyping import Bool

from pallas_kernels.attention.masks import Mask

CELL, GAP, TITLE = 3, 12, 16
"""Pixels of a pair of tokens, between pictures, and of a title."""


def draw_masks(named: Mapping[str, Mask], tokens: int = 64, *, columns: int = 3) -> str:
    """Return an SVG with a picture of each mask over `tokens` tokens of one row, under its name.

    Of a mask by key heads the first one is drawn.
    """
    side = tokens * CELL
    rows = -(-len(named) // columns)
    width, height = columns * (side + GAP) + GAP, rows * (side + TITLE + GAP) + GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">']
    parts.append('<rect width="100%" height="100%" fill="#fff"/>')
    for i, (name, mask) in enumerate(named.items()):
        x, y = GAP + i % columns * (side + GAP), GAP + i // columns * (side + TITLE + GAP)
        seen = np.asarray(mask.seen(tokens, tokens))[0, 0, 0]
        parts += [
            f'<text x="{x}" y="{y + TITLE - 5}" font-family="sans-serif" font-size="12">{escape(name)}</text>',
            f'<g transform="translate({x},{y + TITLE})"><rect width="{side}" height="{side}" fill="#e8ecf1"/>',
            f'<path transform="scale({CELL})" stroke="#2f5d8a" d="{_runs(seen)}"/></g>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _runs(seen: Bool[np.ndarray, "T S"]) -> str:
    """Return a line for each run of visible keys of a query."""
    lines = []
    for row, keys in enumerate(seen):
        edges = np.flatnonzero(np.diff(np.pad(keys, 1).astype(np.int8)))
        lines += [f"M{first} {row + 0.5}h{end - first}" for first, end in edges.reshape(-1, 2)]
    return "".join(lines)
