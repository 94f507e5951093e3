"""The look at a split finds the near-copies that are there."""

import numpy as np
import pytest

import jaxblt.data.leaks
from jaxblt.data.leaks import NearCopyWarning, find_near_copies, warn_near_copies


def draw(rng, count, size):
    return [bytes(b"ACGT"[i] for i in row) for row in rng.integers(0, 4, (count, size))]


def test_near_copies_are_counted():
    rng = np.random.default_rng(0)
    train = draw(rng, 300, 80)
    held = draw(rng, 80, 80)
    other = bytes.maketrans(b"ACGT", b"TGCA")
    copies = [
        train[i][20:] + held[i][:20] for i in range(10)
    ]  # 40 of 60 words are those of a training record
    copies += [train[i][40:] + held[i][:40] for i in range(10, 15)]  # 20 of 60 are
    copies += [train[i].translate(other)[::-1].lower() for i in range(15, 20)]
    found = find_near_copies(train, held + copies)
    assert found == (15 / 100, 100, 21)
    assert find_near_copies(train, held + copies, share=0.2).share == 20 / 100
    with pytest.warns(
        NearCopyWarning,
        match=r"15% of 100 sampled records .* or share half of their 21-letter words with one",
    ):
        warn_near_copies(train, held + copies)
    warn_near_copies(train, held)
    assert find_near_copies(train, []) == (0, 0, 21)
    assert find_near_copies([], held).share == 0


def test_records_shorter_than_a_word_are_compared_whole():
    assert find_near_copies([b"ACGTA", b"GGTTA"], [b"ACGTA", b"ACGTC"]) == (0.5, 2, 21)


def test_both_sides_are_sampled(monkeypatch):
    monkeypatch.setattr(jaxblt.data.leaks, "HELD", 50)
    monkeypatch.setattr(jaxblt.data.leaks, "LETTERS", 4_000)
    records = draw(np.random.default_rng(0), 200, 40)
    found = find_near_copies(records, records[::-1])
    assert found.records == 50
    assert 0.3 < found.share < 0.7  # of half of the training records
