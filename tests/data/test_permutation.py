"""Random order without arrays: bijective, spread out, and the same for ever."""

from collections import Counter
from itertools import permutations

import pytest

from jaxblt.data import hash64, permutation, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 1000, 4097])
def test_every_element_is_reached_once(size):
    assert sorted(permute(i, size, 7) for i in range(size)) == list(range(size))


def test_all_orders_of_four_are_equally_likely():
    draws = 4800
    seen = Counter(tuple(permute(i, 4, key) for i in range(4)) for key in range(draws))
    expected = draws / 24
    chi2 = sum((seen[order] - expected) ** 2 / expected for order in permutations(range(4)))
    assert chi2 < 49.7  # 99.9 % quantile of chi-squared with 23 degrees of freedom


def test_keys_and_epochs_give_other_orders():
    orders = {
        tuple(permute(i, 50, seed, epoch) for i in range(50)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 25


def test_bits_are_fair():
    ones = sum(hash64(0, step, slot) & 1 for step in range(100) for slot in range(100))
    assert abs(ones - 5000) < 4 * 50  # four standard deviations


def test_values_never_change():
    """A run that is resumed by a later version reads the same rows."""
    assert hash64(1, 2, 3) == 0x6AE515C1C0AC7E37
    assert [permute(i, 10, 42, 0) for i in range(10)] == [4, 0, 5, 7, 9, 2, 3, 1, 6, 8]


def test_outside_is_an_error():
    for i in (-1, 5):
        with pytest.raises(IndexError, match=rf"index {i} lies outside 0\.\.4"):
            permute(i, 5, 0)


def test_what_is_sent_through_one_permutation_shares_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch asks for hundreds of rows of one permutation, and keys take longer to make than to use."""
    made = []
    monkeypatch.setattr(permutation, "hash64", lambda *words: made.append(words) or hash64(*words))
    permutation._round_keys.cache_clear()
    for i in range(100):
        permute(i, 1000, 7, 1)
    assert made == [(7, 1, 1000, turn) for turn in range(permutation._ROUNDS)]
    permute(0, 1000, 7, 2)
    assert len(made) == 2 * permutation._ROUNDS
