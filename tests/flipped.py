"""Files of which one bit is changed at a time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

COUNT = 8
"""Bits changed in a file's header, and as many behind it."""


def header_size(content: bytes) -> int:
    """Bytes before a file's arrays: of safetensors, of `.npy`, or all of JSON."""
    if content.startswith(b"\x93NUMPY"):
        return 10 + int.from_bytes(content[8:10], "little")
    return len(content) if content.startswith(b"{") else 8 + int.from_bytes(content[:8], "little")


def flips(file: Path) -> Iterator[str]:
    """Change a bit, say which, and put it back when asked for the next one."""
    content = file.read_bytes()
    head, rng = 8 * header_size(content), np.random.default_rng(0)
    places = [*rng.integers(0, head, COUNT)]
    if 8 * len(content) > head:
        places += [*rng.integers(head, 8 * len(content), COUNT)]
    for place in places:
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        yield f"bit {place} of {file.name}"
    file.write_bytes(content)
