"""Welch's test against scipy's, the effect's size by hand, and samples without spread."""

import math

import numpy as np
import pytest
from scipy import stats

from jaxblt.profiling import Case, compare
from jaxblt.profiling.history import welch


@pytest.mark.parametrize("shift", [0.0, 0.02, -0.5, 3.0])
def test_equals_scipys(shift: float) -> None:
    draw = np.random.default_rng(0)
    first, second = 1 + shift + 0.1 * draw.standard_normal(20), 1 + 0.3 * draw.standard_normal(31)
    found, theirs = welch(first, second), stats.ttest_ind(first, second, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert (found.statistic, found.degrees, found.p) == pytest.approx(
        (theirs.statistic, theirs.df, theirs.pvalue)
    )
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    greater = stats.ttest_ind(first, second, equal_var=False, alternative="greater")
    assert found.p_slower == pytest.approx(greater.pvalue)


def test_the_effect_is_hedges_g() -> None:
    first, second = [1.0, 2.0, 3.0], [4.0, 6.0, 8.0, 6.0]
    pooled = math.sqrt((2 * 1 + 3 * 8 / 3) / 5)
    assert welch(first, second).effect == pytest.approx(-4 / pooled * (1 - 3 / 19))


def test_constants_are_equal_or_are_not() -> None:
    same, more = welch([1.0] * 3, [1.0] * 4), welch([2.0] * 3, [1.0] * 4)
    assert (same.p, same.p_slower, same.effect) == (1, 0.5, 0)
    assert (more.p, more.p_slower, more.effect, more.low, more.high) == (0, 0, math.inf, 1, 1)
    assert welch([1.0] * 3, [2.0] * 4).p_slower == 1


def test_a_sample_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="second sample has 1 values"):
        welch([1.0, 2.0], [1.0])


def test_a_comparison_has_the_test_of_its_trials() -> None:
    found = compare(
        *(Case(name, sum, ([1] * n,)) for name, n in (("long", 9999), ("short", 9))), method="host"
    )
    theirs = stats.ttest_ind(found.first.seconds, found.second.seconds, equal_var=False)
    assert found.welch.p == pytest.approx(theirs.pvalue)
    assert '"effect"' in found.to_json()
