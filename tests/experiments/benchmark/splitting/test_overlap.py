"""Pieces of a row that see an overlap only."""

from dataclasses import replace

import pytest

from experiments.benchmark.splitting.overlap import Settings, errors
from jaxblt.mixers import ExplicitFilter, HyenaConfig


@pytest.mark.slow(days=28, group="long")
def test_an_overlap_as_long_as_the_taps_is_exact_and_a_shorter_one_errs() -> None:
    """Seven taps of the filter and three of the short convolution's four reach nine positions back."""
    settings = Settings(dim=4, length=32, shards=2, overlaps=(0, 4, 9), seeds=1)
    found = errors(HyenaConfig(dim=4, filter=ExplicitFilter(taps=7)), settings)
    assert found[0] > found[4] > 1e-3
    assert found[9] < 1e-6


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="length 10 must be a multiple of shards = 4"):
        replace(Settings(), length=10)
