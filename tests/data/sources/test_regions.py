"""Views of sources: regions read their part and know where documents end; the other strand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import BytesSource, Regions, ReverseComplement, reverse_complement, whole
from tests.data.naive import ALL_BYTES

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


# What each code stands for (IUPAC-IUB 1984).
MEANING = {
    "A": "A", "C": "C", "G": "G", "T": "T", "R": "AG", "Y": "CT", "S": "CG", "W": "AT",
    "K": "GT", "M": "AC", "B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG", "N": "ACGT",
}  # fmt: skip
PARTNER = {"A": "T", "C": "G", "G": "C", "T": "A"}


@given(st.binary(max_size=300))
def test_twice_is_nothing(data):
    assert reverse_complement(reverse_complement(data)) == data


def test_every_code_becomes_the_code_of_the_partners():
    for code, bases in MEANING.items():
        other = reverse_complement(code.encode()).decode()
        assert set(MEANING[other]) == {PARTNER[b] for b in bases}
        assert reverse_complement(code.lower().encode()).decode() == other.lower()


def test_other_bytes_stay():
    others = bytes(b for b in ALL_BYTES if chr(b).upper() not in MEANING)
    assert reverse_complement(others) == others[::-1]


def test_the_view_reads_any_slice():
    bases = b"ACGTNacgtRYKMxGATTACA"
    view = ReverseComplement(BytesSource([b"", bases]))
    full = reverse_complement(bases)
    for start in range(len(bases) + 1):
        for stop in range(start, len(bases) + 1):
            assert view.read(1, start, stop) == full[start:stop]
    assert view.lengths.tolist() == [0, len(bases)]
    assert np.all(view.ends)
