"""Length buckets: one document a row, rows of a few lengths, and no document lost."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxblt.data.packing import PackedIndex, split_long


def rows_within(row_length: int, *, most_rows: int, max_tokens: int | None) -> int:
    """Return the rows of a batch: the largest divisor of `most_rows` within a budget of tokens.

    A divisor, so that batches of every bucket divide among as many devices as possible. None sets no budget.

    Raises:
      ValueError: not even one row is within the budget.
    """
    if max_tokens is None:
        return most_rows
    if row_length > max_tokens:
        raise ValueError(f"max_tokens must hold a row of {row_length} positions, got {max_tokens}")
    return max(n for n in range(1, most_rows + 1) if most_rows % n == 0 and n * row_length <= max_tokens)


def bucket(
    pairs: np.ndarray,
    lengths: Sequence[int],
    row_length: int,
    *,
    alignment: int = 1,
    long_documents: Literal["split", "error"] = "split",
) -> list[PackedIndex]:
    """Put every document into a row of the shortest length that holds it.

    Rows of `row_length` are the overflow bucket: they take what no other bucket holds. Longer documents are cut into
    chunks of `row_length`, each a document of its own. The last chunk goes where it fits.

    Args:
      pairs: Int64[N], pairs in each document (see `rows.pair_counts`).
      lengths: row lengths of the buckets, each at most `row_length`.
      row_length: row length of the overflow bucket.
      alignment: divides every row length.
      long_documents: "split" documents longer than `row_length`, or an "error".

    Returns:
      One index for each bucket that holds a document, shortest rows first.

    Raises:
      ValueError: a bucket is longer than `row_length` or no multiple of `alignment`; a document is too long.
    """
    edges = np.array(sorted({*lengths, row_length}), np.int64)
    if edges[0] < 1 or edges[-1] > row_length:
        raise ValueError(f"buckets must lie in 1..seq_len = 1..{row_length}, got {tuple(lengths)}")
    if alignment < 1 or (edges % alignment).any():
        raise ValueError(
            f"buckets and seq_len must be multiples of alignment = {alignment}, got {edges.tolist()}"
        )
    documents, starts, stops = split_long(pairs, row_length, long_documents=long_documents)
    home = np.searchsorted(edges, stops - starts)
    return [
        PackedIndex(
            row_length=int(edge),
            row_starts=np.arange((home == b).sum() + 1),
            documents=documents[home == b],
            starts=starts[home == b],
            stops=stops[home == b],
            offsets=np.zeros((home == b).sum(), np.int64),
        )
        for b, edge in enumerate(edges)
        if (home == b).any()
    ]
