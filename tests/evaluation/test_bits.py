"""Bits per byte and their interval over documents."""

import math

import numpy as np
import pytest

from jaxblt.evaluation import bits_per_byte, document_bits_per_byte, ratio_interval


def test_a_uniform_guess_over_256_bytes_is_eight_bits() -> None:
    assert bits_per_byte(1000 * math.log(256), 1000) == pytest.approx(8.0)


def test_documents_weigh_by_their_bytes() -> None:
    result = document_bits_per_byte([10 * math.log(2), 990 * 2 * math.log(2)], [10, 990])
    assert result.value == pytest.approx((10 + 990 * 2) / 1000)
    assert result.low == pytest.approx(1.0)
    assert result.high == pytest.approx(2.0)
    assert (result.num_bytes, result.num_documents) == (1000, 2)


def test_interval_covers_the_true_rate() -> None:
    rng = np.random.default_rng(0)
    repeats, documents = 400, 60
    covered = 0
    for seed in range(repeats):
        sizes = rng.integers(100, 1000, documents)
        rates = rng.normal(2.0, 0.3, documents)  # each document has a rate of its own
        result = document_bits_per_byte(rates * sizes * math.log(2), sizes, resamples=400, seed=seed)
        covered += result.low <= 2.0 <= result.high
    assert 0.91 <= covered / repeats <= 0.98


def test_one_document_gives_an_interval_of_no_width() -> None:
    result = document_bits_per_byte([100 * math.log(2)], [100])
    assert result.low == result.value == result.high == pytest.approx(1.0)
    assert str(result) == "1.000 [1.000, 1.000]"


def test_a_share_that_all_documents_have_has_no_width() -> None:
    bottoms = np.array([1.0, 5.0, 30.0])
    assert ratio_interval(0.25 * bottoms, bottoms) == pytest.approx((0.25, 0.25))
    assert ratio_interval(np.array([0.0, 5.0, 30.0]), bottoms) == pytest.approx((0.0, 1.0))


def test_bad_requests_say_what_was_expected() -> None:
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        bits_per_byte(1.0, 0)
    with pytest.raises(ValueError, match="document 1 holds no bytes"):
        document_bits_per_byte([1.0, 0.0], [3, 0])
    with pytest.raises(ValueError, match="one loss and one size"):
        document_bits_per_byte([1.0, 0.0], [3])
