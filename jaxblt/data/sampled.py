"""Samples of data, to tell them from others of the same size without reading all bytes."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from jaxblt.data.sources import DocumentSource

BLOCKS = 64
BLOCK = 1 << 14
"""Bytes that are read at a place; data of up to `BLOCKS` times as many are read whole."""
MOST_LENGTHS = 1 << 16
"""Documents whose lengths are looked at."""


def sample_bytes(source: DocumentSource) -> Iterator[bytes]:
    """Yield blocks of a source's bytes, evenly spread over its documents, and the documents' lengths."""
    ends = np.cumsum(source.lengths, dtype=np.int64)
    yield np.asarray(ends[:: 1 + len(ends) // MOST_LENGTHS], "<i8").tobytes()
    total = int(ends[-1]) if len(ends) else 0
    count = min(BLOCKS, -(-total // BLOCK))
    for place in np.linspace(0, max(total - BLOCK, 0), count).astype(np.int64):
        yield from _read_block(source, ends, int(place))


def _read_block(source: DocumentSource, ends: np.ndarray, place: int) -> Iterator[bytes]:
    """Give the bytes from a place on, over the ends of documents."""
    document, left = int(np.searchsorted(ends, place, side="right")), BLOCK
    while left and document < len(ends):
        length = int(source.lengths[document])
        start = max(place - int(ends[document]) + length, 0)
        stop = min(start + left, length)
        if stop > start:
            yield source.read(document, start, stop)
        document, left = document + 1, left - (stop - start)


def hash_parts(parts: Iterable[bytes]) -> str | None:
    """Return a hash of all parts in order; None without one."""
    digest, count = hashlib.sha256(), 0
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
        count += 1
    return digest.hexdigest() if count else None
