"""Bits per byte of general compressors: what a byte model has to beat."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

Compressor = Literal["gzip", "bzip2", "xz"]

# Keep these as strong as possible: zlib at level 9 is gzip -9 less an 18-byte header; xz has its strongest preset and
# no integrity check.
_COMPRESS: dict[Compressor, Callable[[bytes], bytes]] = {
    "gzip": lambda data: zlib.compress(data, 9),
    "bzip2": lambda data: bz2.compress(data, 9),
    "xz": lambda data: lzma.compress(data, check=lzma.CHECK_NONE, preset=9 | lzma.PRESET_EXTREME),
}


def compressor_bits_per_byte(data: bytes, compressor: Compressor, *, primer: bytes = b"") -> float:
    """Return 8 * compressed bytes / bytes of `data`, at the compressor's strongest setting.

    Without a `primer`, as is the convention, only the held-out bytes are compressed. Then the compressor has seen
    nothing before, unlike a trained model. With a primer, usually the training bytes, the figure is

        8 * (size(primer + data) - size(primer)) / len(data),

    what the held-out bytes cost after the compressor has read the primer. Only the part of the primer that its window
    still holds helps. The window has 32 KiB for gzip, the open block of at most 900 kB for bzip2, 64 MiB for xz.

    Raises:
      ValueError: no data.
    """
    if not data:
        raise ValueError("there is nothing to compress: data is empty")
    compress = _COMPRESS[compressor]
    before = len(compress(primer)) if primer else 0
    return 8.0 * (len(compress(primer + data)) - before) / len(data)


def compressor_table(
    data: bytes, *, primer: bytes = b"", compressors: Sequence[Compressor] = ("gzip", "bzip2", "xz")
) -> dict[str, float]:
    """Return bits per byte by compressor name, and with a primer also by "name, primed"."""
    figures = {name: compressor_bits_per_byte(data, name) for name in compressors}
    primed = {f"{c}, primed": compressor_bits_per_byte(data, c, primer=primer) for c in compressors if primer}
    return figures | primed
