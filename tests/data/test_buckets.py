"""Buckets: no document lost, each in the shortest row that holds it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data.buckets import bucket
from tests.data.naive import check_layout, pair_lists, visits


@given(pair_lists, st.lists(st.integers(1, 20), max_size=4), st.integers(20, 30))
def test_nothing_is_lost_and_rows_are_the_shortest(pairs, lengths, overflow):
    indexes = bucket(pairs, lengths, overflow)
    edges = sorted({*lengths, overflow})
    total = [np.zeros(n, int) for n in pairs]
    for index in indexes:
        check_layout(index)
        for count, more in zip(total, visits(index, pairs), strict=True):
            count += more
        for row in range(len(index)):
            [span] = index.spans(row)
            assert index.row_length == min(e for e in edges if e >= span.stop - span.start)
    assert all((count == 1).all() for count in total)
    assert [i.row_length for i in indexes] == sorted({i.row_length for i in indexes})


def test_longer_documents_overflow_in_pieces():
    indexes = bucket(np.array([3, 19, 40]), (4, 8), 16)
    rows = {
        i.row_length: [(s.document, s.start, s.stop) for r in range(len(i)) for s in i.spans(r)]
        for i in indexes
    }
    assert rows == {4: [(0, 0, 3), (1, 16, 19)], 8: [(2, 32, 40)], 16: [(1, 0, 16), (2, 0, 16), (2, 16, 32)]}


def test_bad_buckets():
    with pytest.raises(ValueError, match=r"buckets must lie in 1..seq_len = 1..16, got \(4, 32\)"):
        bucket(np.array([3]), (4, 32), 16)
    with pytest.raises(ValueError, match=r"multiples of alignment = 8, got \[4, 16\]"):
        bucket(np.array([3]), (4,), 16, alignment=8)
    with pytest.raises(ValueError, match="document 0 has 17 bytes"):
        bucket(np.array([17]), (4,), 16, long_documents="error")
