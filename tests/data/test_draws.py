"""Random numbers of a key."""

import numpy as np

from jaxblt.data import Draws, hash64


def test_words_are_those_of_the_hash_in_order():
    start, golden = hash64(1, 2), 0x9E3779B97F4A7C15
    assert Draws(1, 2).words(50).tolist() == [hash64(start + n * golden) for n in range(50)]


def test_a_stream_does_not_depend_on_how_it_is_taken():
    whole, parts = Draws(7), Draws(7)
    assert whole.words(10).tolist() == [*parts.words(3), *parts.words(0), *parts.words(7)]
    assert Draws(7).words(4).tolist() != Draws(8).words(4).tolist()


def test_numbers_lie_where_they_should_and_are_spread_evenly():
    draws = Draws(3)
    assert np.bincount(draws.below(10, 10_000), minlength=10).min() > 900
    assert {draws.between(-1, 2) for _ in range(100)} == {-1, 0, 1, 2}
    uniform = draws.uniform(10_000)
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01


def test_distinct_numbers():
    for key in range(20):
        for limit, count in ((9, 5), (9, 2), (1000, 200)):
            found = Draws(key).distinct(limit, count)
            assert len(set(found.tolist())) == len(found) == count
            assert 0 <= found.min() <= found.max() < limit
    assert sorted(Draws(1).distinct(9, 9).tolist()) == list(range(9))
    for count in (1, 2):  # by either method
        last = [int(Draws(key).distinct(4, count)[-1]) for key in range(1000)]
        assert np.bincount(last).min() > 200


def test_weighted_draws_go_by_their_weights():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    found = np.array([Draws(key).weighted(weights, 2) for key in range(4000)])
    assert np.allclose(np.bincount(found[:, 0], minlength=4) / 4000, weights / 8, atol=0.03)
    second = np.bincount(found[found[:, 0] == 0, 1], minlength=4)
    assert np.allclose(second / second.sum(), [0, 0.5, 0.25, 0.25], atol=0.04)
