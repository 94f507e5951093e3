"""Rows: which bytes of which documents make up a row, and how they become arrays.

A document of n bytes is the stream BOS, b_0, ..., b_{n-1} (and EOS where it ends). Pair p of a document is
the input stream[p] and the target stream[p+1]: n pairs, and one more with EOS. Every index cuts documents into spans of
pairs. Each target is in one span, and the first input of a span is the byte before it, or BOS.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxblt.data.sources.base import DocumentSource
from jaxblt.data.vocab import BOS, EOS, OFFSET, PAD


class Span(NamedTuple):
    """Pairs [start, stop) of a document at `offset` in their row; those before `scored` are not scored."""

    document: int
    start: int
    stop: int
    offset: int
    scored: int


@runtime_checkable
class RowIndex(Protocol):
    """A list of rows of `row_length` positions, each a list of spans."""

    @property
    def row_length(self) -> int: ...

    def __len__(self) -> int: ...

    def spans(self, row: int) -> list[Span]: ...


def pair_counts(lengths: np.ndarray, ends: np.ndarray, *, eos: bool) -> np.ndarray:
    """Return Int64[N], pairs of (input, target) in each document.

    EOS is a target only where the document ends.
    """
    return lengths + (ends if eos else np.zeros_like(ends)).astype(np.int64)


def stream_ids(source: DocumentSource, document: int, start: int, stop: int) -> np.ndarray:
    """Return Int32 ids stream[start : stop + 1]: inputs and targets of pairs [start, stop)."""
    length = int(source.lengths[document])
    data = source.read(document, max(start - 1, 0), min(stop, length))
    ids = np.empty(stop + 1 - start, np.int32)
    first = 1 if start == 0 else 0
    ids[first : first + len(data)] = np.frombuffer(data, np.uint8).astype(np.int32) + OFFSET
    if start == 0:
        ids[0] = BOS
    if stop == length + 1:
        ids[-1] = EOS
    return ids


def empty_rows(count: int, row_length: int) -> dict[str, np.ndarray]:
    """Return Int32[count, row_length] arrays of padding, one for each field of a batch."""
    fill = {"inputs": PAD, "targets": PAD, "segment_ids": 0, "positions": 0, "loss_mask": 0}
    return {name: np.full((count, row_length), value, np.int32) for name, value in fill.items()}


def write_span(row: dict[str, np.ndarray], ids: np.ndarray, span: Span, segment: int) -> None:
    """Write one span into a row as document `segment`, positions from 0.

    Its `ids` are those of `stream_ids`.
    """
    count = span.stop - span.start
    place = slice(span.offset, span.offset + count)
    row["inputs"][place] = ids[:-1]
    row["targets"][place] = ids[1:]
    row["segment_ids"][place] = segment
    row["positions"][place] = np.arange(count, dtype=np.int32)
    row["loss_mask"][span.offset + span.scored - span.start : span.offset + count] = 1
