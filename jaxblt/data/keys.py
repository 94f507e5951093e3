"""Keys of documents: what says of two sources, of different splits or orders, that a document is the same."""

import zlib

from jaxblt.data.sources.base import DocumentSource

HEAD = 1024
"""Bytes at a document's beginning that its key is made of, with its length."""


def document_key(source: DocumentSource, document: int) -> int:
    """Return the CRC-32 of a document's length and first bytes, in 1..2^31 - 1.

    0 is the key of no document. Among 100,000 other documents one has the same key with a probability of 5 in 10^5. Its
    chunks are then left out, too, and nothing else happens.
    """
    length = int(source.lengths[document])
    head = source.read(document, 0, min(HEAD, length))
    return (zlib.crc32(length.to_bytes(8, "little") + head) & 0x7FFFFFFF) or 1
