"""Regions read their part and know where documents end."""

import numpy as np
import pytest

from jaxblt.data import BytesSource, Regions, whole

SOURCE = BytesSource([b"0123456789", b"abcdef"], ["digits", "letters"])
PARTS = Regions(SOURCE, np.array([0, 1, 0]), np.array([2, 0, 5]), np.array([5, 6, 10]))


def test_parts_are_documents():
    assert [PARTS.read(i, 0, int(n)) for i, n in enumerate(PARTS.lengths)] == [b"234", b"abcdef", b"56789"]
    assert PARTS.read(2, 1, 3) == b"67"
    assert PARTS.names == ["digits[2:5]", "letters", "digits[5:10]"]
    assert PARTS.ends.tolist() == [False, True, True]


def test_nothing_outside_is_read():
    with pytest.raises(IndexError, match=r"'digits\[2:5\]', which has \[0, 3\)"):
        PARTS.read(0, 0, 4)


def test_regions_of_regions_end_where_the_document_ends():
    again = Regions(PARTS, np.array([0, 2]), np.array([0, 0]), np.array([3, 5]))
    assert again.ends.tolist() == [False, True]
    assert again.read(1, 0, 5) == b"56789"


def test_whole_documents():
    assert whole(SOURCE).names == ["digits", "letters"]
    assert whole(SOURCE, np.array([1])).read(0, 0, 6) == b"abcdef"


def test_bytes_source_needs_a_name_each():
    with pytest.raises(ValueError, match="2 documents need as many names, got 1"):
        BytesSource([b"a", b"b"], ["a"])
