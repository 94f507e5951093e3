"""Keys of documents: the same document has the same key in other sources, splits and orders."""

import zlib

from jaxblt.data.sources.base import DocumentSource

HEAD = 1024
"""Bytes at a document's beginning that its key is made of, with its length."""


def document_key(source: DocumentSource, document: int) -> int:
    """Return the CRC-32 of a document's length and first bytes, in 1..2^31 - 1.

    0 is the key of no document. With a probability of 5 in 10^5 one of 100,000 other documents has the same key. Then a
    router leaves out its chunks too, and nothing else happens.
    """
    length = int(source.lengths[document])
    head = source.read(document, 0, min(HEAD, length))
    return (zlib.crc32(length.to_bytes(8, "little") + head) & 0x7FFFFFFF) or 1
