"""Windows: nothing lost, nothing across documents, every target scored once in evaluation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import WindowIndex
from tests.data.naive import check_layout, pair_lists, visits

shapes = st.integers(1, 12).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t)))


def naive_windows(pairs, length, stride, partial):
    rows = []
    for document, n in enumerate(pairs):
        start, reached = 0, 0
        while start + length <= n:
            rows.append((document, start, start + length))
            reached = start + length
            start += stride
        if partial == "keep" and reached < n:
            rows.append((document, start, n))
    return rows


@given(pair_lists, shapes, st.sampled_from(["keep", "drop"]))
def test_windows_are_the_naive_ones(pairs, shape, partial):
    index = WindowIndex(pairs, shape[0], shape[1], partial)
    spans = [index.spans(row) for row in range(len(index))]
    assert [(s.document, s.start, s.stop) for [s] in spans] == naive_windows(
        pairs, shape[0], shape[1], partial
    )
    assert all(s.offset == 0 and s.scored == s.start for [s] in spans)
    check_layout(index)


@given(pair_lists, shapes)
def test_keeping_loses_nothing_and_new_scores_once(pairs, shape):
    index = WindowIndex(pairs, shape[0], shape[1], score="new")
    assert all((v >= 1).all() for v in visits(index, pairs))
    assert all((v == 1).all() for v in visits(index, pairs, scored_only=True))
    check_layout(index)


@given(pair_lists, shapes)
def test_scored_pairs_have_their_context(pairs, shape):
    length, stride = shape
    index = WindowIndex(pairs, length, stride, score="new")
    for [span] in (index.spans(row) for row in range(len(index))):
        assert span.scored - span.start == (length - stride if span.start else 0)


def test_stride_of_the_window_visits_every_pair_once():
    pairs = np.array([0, 5, 12, 13])
    assert all((v == 1).all() for v in visits(WindowIndex(pairs, 4, 4), pairs))


@pytest.mark.parametrize("stride", [0, 9])
def test_a_stride_that_skips_is_an_error(stride):
    with pytest.raises(
        ValueError,
        match=rf"stride must lie in 1..seq_len = 1..8 .*got {stride}: set data.stride to None",
    ):
        WindowIndex(np.array([20]), 8, stride)


def test_rows_that_do_not_exist():
    index = WindowIndex(np.array([20]), 8, 8)
    for row in (-1, 3):
        with pytest.raises(IndexError, match="the index has 3"):
            index.spans(row)
    assert len(WindowIndex(np.zeros(0, np.int64), 8, 8)) == 0
