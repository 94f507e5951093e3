"""Groups of near-copies: none lies in two parts, whatever the records are and in whichever order they come."""

from itertools import combinations

import numpy as np
import pytest

import jaxblt.data.groups
from jaxblt.data.deal import deal_records
from jaxblt.data.groups import group_records

COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")


def words(sequence, length, both_strands):
    """The words of a record, one by one."""
    found = set()
    for i in range(len(sequence) - length + 1):
        word = sequence[i : i + length]
        found.add(min(word, word.translate(COMPLEMENT)[::-1]) if both_strands else word)
    return found or {(min(sequence, sequence.translate(COMPLEMENT)[::-1]) if both_strands else sequence,)}


def near_pairs(sequences, length, share, both_strands):
    """All pairs of near-copies, pair by pair."""
    sets = [words(s.upper(), length, both_strands) for s in sequences]
    return [
        (i, j)
        for i, j in combinations(range(len(sets)), 2)
        if len(sets[i] & sets[j]) >= max(share * min(len(sets[i]), len(sets[j])) - 1e-9, 1)
    ]


def connected(count, pairs):
    """The records of each group, by joining."""
    group = {i: {i} for i in range(count)}
    for i, j in pairs:
        if group[i] is not group[j]:
            group[i] |= group[j]
            for k in group[j]:
                group[k] = group[i]
    return {frozenset(g) for g in group.values()}


def family(rng, letters, count):
    """Records of which many share a stretch, a start that all have, or nearly everything; some are short."""

    def draw(n):
        return "".join(letters[i] for i in rng.integers(0, len(letters), n))

    stretches, start = [draw(60) for _ in range(6)], draw(12)
    found = []
    for _ in range(count):
        whole = stretches[rng.integers(6)] + draw(10)
        at, size = rng.integers(0, 40), rng.integers(4, 50)
        piece = list(whole[at : at + size] + draw(rng.integers(0, 30)))
        for place in rng.integers(0, len(piece), rng.integers(0, 3)):
            piece[place] = draw(1)
        text = start + "".join(piece) if rng.random() < 0.5 else "".join(piece)
        if letters == "ACGT" and rng.random() < 0.3:
            text = text.encode().translate(COMPLEMENT)[::-1].decode()
        found.append((text.lower() if rng.random() < 0.2 else text).encode())
    return [*found, found[0], found[1]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("letters", "length"), [("ACGT", 6), ("ACDEFGHIKLMNPQRSTVWY", 3), ("ab c", 8)])
def test_groups_are_those_of_all_pairs(seed, letters, length, monkeypatch):
    monkeypatch.setattr(jaxblt.data.groups, "ROWS", 16)
    monkeypatch.setattr(jaxblt.data.groups, "ENTRIES", 500)
    rng = np.random.default_rng(seed)
    sequences = family(rng, letters, 80)
    share = [0.2, 0.5, 0.5, 0.8, 1.0, 1e-6][seed]
    pairs = near_pairs(sequences, length, share, letters == "ACGT")
    groups = group_records(sequences, length=length, share=share)
    found = {frozenset(np.flatnonzero(groups == g).tolist()) for g in groups}
    assert found == connected(len(sequences), pairs)

    labels = [[s[:1].upper()] for s in sequences]
    options = {"length": length, "share": share, "fractions": (0.5, 0.25, 0.25), "seed": seed}
    if len(found) < 3:
        return
    dealt = deal_records(sequences, labels, **options)
    assert all(dealt[i] == dealt[j] for i, j in pairs)
    order = rng.permutation(len(sequences))
    again = deal_records([sequences[i] for i in order], [labels[i] for i in order], **options)
    assert again == [dealt[i] for i in order]


def test_records_shorter_than_words_are_refused():
    said = r"4 of 5 records have fewer letters than the words .*: set group_k = 21 to a third"
    with pytest.raises(ValueError, match=said):
        group_records([b"ACGTTGCATATAATACGTACGGATCCA", b"ACGT", b"ACG", b"AC", b"A"])
