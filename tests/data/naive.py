"""Slow, obvious versions of what the data room computes, and strategies for its inputs."""

import numpy as np
from hypothesis import strategies as st

from jaxblt.data.vocab import BOS, EOS, OFFSET

ALL_BYTES = bytes(range(256))
pair_lists = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(lambda x: np.array(x, np.int64))


def stream(data: bytes, *, eos: bool) -> list[int]:
    """BOS, bytes, and EOS, one id after another."""
    return [BOS, *(byte + OFFSET for byte in data)] + [EOS] * eos


def visits(index, pairs: np.ndarray, *, scored_only: bool = False) -> list[np.ndarray]:
    """How often each pair of each document occurs in an index (where it is scored, if asked)."""
    counts = [np.zeros(n, int) for n in pairs]
    for row in range(len(index)):
        for span in index.spans(row):
            for pair in range(span.scored if scored_only else span.start, span.stop):
                counts[span.document][pair] += 1
    return counts


def check_layout(index, *, alignment: int = 1) -> None:
    """Spans lie inside their row, in order, apart, and at multiples of the alignment."""
    for row in range(len(index)):
        used = 0
        for span in index.spans(row):
            assert span.offset % alignment == 0
            assert span.offset >= used
            assert span.start <= span.scored < span.stop
            used = span.offset + span.stop - span.start
        assert 0 < used <= index.row_length


def documents_of(batch) -> list[list[tuple[int, int]]]:
    """The (input, target) pairs of every document of a batch, cut out position by position."""
    found = []
    for inputs, targets, segments in zip(batch.inputs, batch.targets, batch.segment_ids, strict=True):
        rows: dict[int, list[tuple[int, int]]] = {}
        for x, y, s in zip(inputs.tolist(), targets.tolist(), segments.tolist(), strict=True):
            if s:
                rows.setdefault(s, []).append((x, y))
        found += [rows[s] for s in sorted(rows)]
    return found
