"""Packing: every pair in one row, aligned, in as many rows as the textbook says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import pack
from tests.data.naive import check_layout, pair_lists, visits

grids = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(
    lambda x: (x[0] * x[1], x[0])
)  # row length, alignment
methods = st.sampled_from(["first_fit", "sequential"])


@given(pair_lists, grids, methods)
def test_every_pair_once_aligned_and_inside(pairs, grid, method):
    length, alignment = grid
    index = pack(pairs, length, alignment=alignment, method=method)
    assert all((v == 1).all() for v in visits(index, pairs))
    check_layout(index, alignment=alignment)


@given(pair_lists, grids)
def test_first_fit_decreasing_is_the_textbook_one(pairs, grid):
    """Chunks of one size are placed in the documents' order, and a row is read in it."""
    length, alignment = grid
    chunks = [(d, s) for d, n in enumerate(pairs.tolist()) for s in range(0, n, length)]
    size = {(d, s): -(-min(length, pairs[d] - s) // alignment) * alignment for d, s in chunks}
    rows: list[list[tuple[int, int]]] = []
    for chunk in sorted(chunks, key=lambda chunk: -size[chunk]):
        fitting = [row for row in rows if sum(size[c] for c in row) + size[chunk] <= length]
        if fitting:
            fitting[0].append(chunk)
        else:
            rows.append([chunk])
    index = pack(pairs, length, alignment=alignment)
    found = [[(span.document, span.start) for span in index.spans(r)] for r in range(len(index))]
    assert found == [sorted(row) for row in rows]


@given(pair_lists, grids)
def test_sequential_is_the_textbook_next_fit(pairs, grid):
    length, alignment = grid
    rows: list[list[tuple[int, int, int, int]]] = []
    used = length
    for document, n in enumerate(pairs.tolist()):
        for start in range(0, n, length):
            stop = min(start + length, n)
            if used + stop - start > length:
                rows.append([])
                used = 0
            rows[-1].append((document, start, stop, used))
            used += -(-(stop - start) // alignment) * alignment
    index = pack(pairs, length, alignment=alignment, method="sequential")
    assert [[span[:4] for span in index.spans(row)] for row in range(len(index))] == rows


def test_long_documents_become_pieces_of_their_own():
    index = pack(np.array([10, 3]), 4, method="sequential")
    assert [[(s.document, s.start, s.stop) for s in index.spans(r)] for r in range(len(index))] == [
        [(0, 0, 4)],
        [(0, 4, 8)],
        [(0, 8, 10)],
        [(1, 0, 3)],
    ]


def test_long_documents_can_be_an_error():
    with pytest.raises(
        ValueError, match=r"document 1 has 9 bytes .* more than seq_len = 8: raise it, or split"
    ):
        pack(np.array([3, 9]), 8, long_documents="error")
    assert len(pack(np.array([3, 8]), 8, long_documents="error")) == 2


@pytest.mark.parametrize("alignment", [0, 3])
def test_alignment_must_divide_the_row(alignment):
    with pytest.raises(ValueError, match=f"seq_len must be a multiple of alignment, got 8 and {alignment}"):
        pack(np.array([3]), 8, alignment=alignment)


def test_many_documents_pack_tightly():
    lengths = np.random.default_rng(0).integers(1, 4097, 100_000)
    index = pack(lengths, 8192, alignment=64)
    best = -(-int((-(-lengths // 64) * 64).sum()) // 8192)
    assert len(index) <= 1.01 * best
    assert index.row_starts[-1] == len(lengths)


def test_no_documents_no_rows():
    for long_documents in ("split", "error"):
        assert len(pack(np.zeros(0, np.int64), 8, long_documents=long_documents)) == 0
    with pytest.raises(IndexError, match="the index has 0"):
        pack(np.zeros(0, np.int64), 8).spans(0)
    with pytest.raises(IndexError, match="row -1 does not exist: the index has 1"):
        pack(np.array([3]), 8).spans(-1)
