"""Words of records: equal words, and no others, have equal codes, and letters are what the kind of record says."""

import numpy as np
import pytest

from jaxblt.data.words import find_words, kind_of, word_sets


def draw(letters, sizes, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(letters[i] for i in rng.integers(0, len(letters), n)).encode() for n in sizes]


@pytest.mark.parametrize(
    ("letters", "length"), [("ab", 1), ("abc", 5), ("Aé~ x", 7), ("ACGTN", 3), ("AC", 150)]
)
def test_codes_are_those_of_equal_words(letters, length):
    """Words of 150 letters do not fit into 62 bits."""
    unit = draw(letters, [60])[0]
    sequences = [*draw(letters, [0, length, 40, 200, 9]), unit * 6, unit * 4]
    found = find_words(sequences, length, "text", both_strands=False)
    words = [
        (i, s.upper()[p : p + length]) for i, s in enumerate(sequences) for p in range(len(s) - length + 1)
    ]
    assert found.record.tolist() == [i for i, _ in words]
    pairs = set(zip(found.code.tolist(), (word for _, word in words), strict=True))
    assert len(pairs) == len({code for code, _ in pairs}) == len({word for _, word in pairs})


def test_strands_and_letters_of_dna():
    sequences = [b"AACCGTTTGCA", b"aaccguuugca", b"TGCAAACGGTT", b"AACCGNTTTGCA", b"ACG", b"CGT", b"ACN"]
    sizes, shared = word_sets(sequences, 5, "dna")
    assert sizes.tolist() == [7, 7, 7, 3, 1, 1, 1]
    held = shared.T.toarray()
    assert (held[0] == held[1]).all()
    assert (held[0] == held[2]).all()
    assert held[3].sum() == 3
    assert (held[4] == held[5]).all()
    assert held[6].sum() == 0
    assert find_words(sequences, 4, "dna", both_strands=False).base == 4
    assert not len(find_words([b"", b"A"], 5, "dna", both_strands=True).code)


def test_kinds_are_known_by_their_letters():
    assert kind_of([b"acguNNACGU", b"ACGTRYACGT"]) == "dna"
    assert kind_of([b"MKVLAAGIVGLLLAQWERTY", b"ACGT"]) == "protein"
    assert kind_of([b"The cat sat on the mat."]) == kind_of(["Das ist süß".encode()]) == "text"
    assert kind_of([]) == "text"
