"""The other strand undoes itself and complements what the codes stand for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import BytesSource, ReverseComplement, reverse_complement
from tests.data.naive import ALL_BYTES

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
