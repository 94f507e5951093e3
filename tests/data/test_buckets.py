"""Buckets: no document lost, each in the shortest row that holds it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import BytesSource, DataConfig, make_dataset
from jaxblt.data.buckets import bucket, rows_within
from tests.data.naive import check_layout, pair_lists, visits

documents = st.lists(st.binary(min_size=1, max_size=31), min_size=1, max_size=40)


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


@given(documents, st.sampled_from([32, 40, 64, 100, 10**6]), st.sampled_from([1, 6, 8]))
def test_batches_keep_within_tokens_and_sequences_and_hold_each_document_once(docs, max_tokens, batch_size):
    config = DataConfig(
        seq_len=32, batch_size=batch_size, packing="buckets", buckets=(4, 8, 16), max_tokens=max_tokens
    )
    data = make_dataset(config, split="all", mode="eval", source=BytesSource(docs))
    found = []
    for step in range(data.num_batches):
        segments, targets = data.batch(step).segment_ids, data.batch(step).targets
        rows, length = segments.shape
        assert rows * length <= max_tokens
        assert rows <= batch_size
        assert rows == data.rows_at(step) == rows_within(length, most_rows=batch_size, max_tokens=max_tokens)
        found += [
            bytes((t[s > 0][:-1] - 4).tolist()) for t, s in zip(targets, segments, strict=True) if s.any()
        ]
    assert sorted(found) == sorted(docs)


def test_an_epoch_of_training_holds_each_document_once():
    docs = [bytes([i]) * (3, 12, 25)[i % 3] for i in range(48)]
    config = DataConfig(seq_len=32, batch_size=8, packing="buckets", buckets=(8, 16), max_tokens=64)
    data = make_dataset(config, split="all", source=BytesSource(docs))
    assert data.batch_sizes == (8, 4, 2)
    for first in (0, 14):  # 2 + 4 + 8 batches
        epoch = [data.batch(step).targets[:, 0] - 4 for step in range(first, first + 14)]
        assert sorted(np.concatenate(epoch).tolist()) == list(range(48))


def test_rows_of_a_budget():
    assert [rows_within(n, most_rows=12, max_tokens=100) for n in (8, 9, 16, 17, 25, 34, 51, 100)] == [
        *(12, 6, 6, 4, 4, 2, 1, 1)
    ]
    with pytest.raises(ValueError, match="max_tokens must hold a row of 101 positions, got 100"):
        rows_within(101, most_rows=12, max_tokens=100)


def test_a_budget_that_leaves_too_few_rows_for_the_processes():
    config = DataConfig(seq_len=32, batch_size=8, packing="buckets", buckets=(8,), max_tokens=64)
    source = BytesSource([b"a", b"b" * 30])
    with pytest.raises(
        ValueError, match="2 rows of 32 positions does not divide among 4 processes: raise max_tok"
    ):
        make_dataset(config, split="all", source=source, process_count=4)
