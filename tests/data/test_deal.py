"""Whole groups are dealt: parts have their shares of each label, and too few groups are refused."""

from collections import Counter

import numpy as np
import pytest

from jaxblt.data.deal import deal_groups, deal_records


def test_parts_have_their_shares_of_each_label():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 150)
    groups = np.repeat(np.arange(150), sizes)
    labels = [["rare" if g % 5 == 0 else "usual", "x"] for g in groups]
    sequences = [f"{i}".encode() for i in range(len(groups))]
    fractions = (0.7, 0.1, 0.2)
    parts = deal_groups(sequences, groups, labels, fractions=fractions)
    for name in ("rare", "usual"):
        of = [part for part, (label, _) in zip(parts.tolist(), labels, strict=True) if label == name]
        shares = [Counter(of)[part] / len(of) for part in range(3)]
        np.testing.assert_allclose(shares, fractions, atol=0.03)
    large = np.flatnonzero(sizes >= 4)
    assert {parts[groups == g][0] for g in large} == {0, 1, 2}
    other = deal_groups(sequences, groups, labels, fractions=fractions, seed=1)
    assert (other != parts).any()
    assert set(deal_groups(sequences, groups, labels, fractions=(0.5, 0, 0.5)).tolist()) == {0, 2}


def test_what_cannot_be_dealt():
    one = [b"ACGTTGCATATAATACGTACGGATCCA" + bytes([letter]) for letter in b"ACGT" * 5]
    with pytest.raises(
        ValueError,
        match=r"20 records are 1 group of near-copies, and fractions = \(0.8, 0.1, 0.1\) ask for 3 parts: raise",
    ):
        deal_records(one, [[]] * 20)
    assert deal_records([], []) == []
