"""Packing: several documents in a row, by an index that is computed once."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxblt.data.rows import Span
from jaxblt.show import show


@dataclass(frozen=True, eq=False)
class PackedIndex:
    """Rows of spans, stored flat: row r holds spans [row_starts[r], row_starts[r + 1]).

    Attributes:
      row_length: positions in a row (T).
      row_starts: Int64[R + 1].
      documents, starts, stops, offsets: Int64[S], the spans (see `rows.Span`).
    """

    row_length: int
    row_starts: np.ndarray
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    offsets: np.ndarray

    __repr__ = show

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def spans(self, row: int) -> list[Span]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist: the index has {len(self)}")
        part = slice(self.row_starts[row], self.row_starts[row + 1])
        columns = (
            x[part].tolist() for x in (self.documents, self.starts, self.stops, self.offsets, self.starts)
        )
        return [Span(*values) for values in zip(*columns, strict=True)]


def pack(
    pairs: np.ndarray,
    row_length: int,
    *,
    alignment: int = 1,
    method: Literal["first_fit", "sequential"] = "first_fit",
    long_documents: Literal["split", "error"] = "split",
) -> PackedIndex:
    """Pack documents into rows; every pair is in exactly one row.

    Args:
      pairs: Int64[N], pairs in each document (see `rows.pair_counts`).
      row_length: positions in a row (T).
      alignment: every document starts at a multiple of it; divides T.
      method: "first_fit" goes by decreasing length (Johnson 1973: at most 11/9 of the best number of rows, + 1).
        "sequential" keeps the documents' order, and begins a row where the next one does not fit.
      long_documents: documents longer than a row are an "error", or are "split" into chunks that are documents of their
        own. There positions restart, and the first input is the byte before.

    Raises:
      ValueError: `alignment` does not divide T, or a document is longer than a row and was to be an error.
    """
    if alignment < 1 or row_length % alignment:
        raise ValueError(f"seq_len must be a multiple of alignment, got {row_length} and {alignment}")
    documents, starts, stops = split_long(pairs, row_length, long_documents=long_documents)
    sizes = -(-(stops - starts) // alignment)  # in units of the alignment, rounded up
    rows = (_first_fit if method == "first_fit" else _sequential)(sizes, row_length // alignment)
    order = np.argsort(rows, kind="stable")  # within a row, the documents' order
    rows, sizes = rows[order], sizes[order]
    row_starts = np.searchsorted(rows, np.arange((rows[-1] + 1 if len(rows) else 0) + 1))
    before = np.cumsum(sizes) - sizes
    offsets = (before - before[row_starts[rows]]) * alignment
    return PackedIndex(row_length, row_starts, documents[order], starts[order], stops[order], offsets)


def split_long(
    pairs: np.ndarray, row_length: int, *, long_documents: Literal["split", "error"] = "split"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into chunks of at most `row_length` pairs.

    Returns documents, starts and stops, in order.
    """
    if long_documents == "error" and len(pairs) and pairs.max() > row_length:
        i = int(pairs.argmax())
        raise ValueError(
            f"document {i} has {pairs[i]} bytes (EOS counted), more than seq_len = {row_length}: raise "
            "it, or split it with long_documents='split'"
        )
    counts = -(-pairs // row_length)
    documents = np.repeat(np.arange(len(pairs)), counts)
    chunk = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = chunk * row_length
    return documents, starts, np.minimum(starts + row_length, pairs[documents])


def _first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each chunk by first-fit decreasing.

    Chunks of one size fill the open rows left to right.
    """
    rows = np.zeros(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    left = np.zeros(0, np.int64)  # room left in each open row
    for group in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        if not len(group):
            continue
        size = int(sizes[group[0]])
        fits = left // size
        missing = len(group) - int(fits.sum())
        if missing > 0:
            new = -(-missing // (room // size))
            left, fits = np.append(left, np.full(new, room)), np.append(fits, np.full(new, room // size))
        taken = np.clip(len(group) - (np.cumsum(fits) - fits), 0, fits)
        rows[group] = np.repeat(np.arange(len(left)), taken)
        left = left - taken * size
    return rows


def _sequential(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each chunk when rows are filled in order."""
    rows, row, used = np.zeros(len(sizes), np.int64), 0, 0
    for i, size in enumerate(sizes.tolist()):
        if used + size > room:
            row, used = row + 1, 0
        rows[i] = row
        used += size
    return rows
