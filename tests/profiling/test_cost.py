"""The price of 1,000 samples is arithmetic on a measured rate."""

import re
import time

import pytest

from jaxblt.profiling import cost_per_thousand, measure


def test_a_thousand_samples_cost_the_hours_that_they_take():
    # Half a sample a second: 2,000 s at 3.60 an hour
    assert cost_per_thousand(0.5, 3.6) == pytest.approx(2.0)
    assert cost_per_thousand(1e6, 0.0) == 0.0
    taken = measure(lambda: time.sleep(0.001), trials=20, method="host").summary.median
    assert cost_per_thousand(8 / taken, 3.6) == pytest.approx(taken * 125 / 1000)


@pytest.mark.parametrize(
    ("rate", "price", "said"),
    [
        (0.0, 1.0, "samples_per_second must be > 0, got 0.0"),
        (float("nan"), 1.0, "samples_per_second must be a finite number, got nan"),
        (1.0, -1.0, "price_per_hour must be at least 0, got -1.0"),
    ],
)
def test_what_is_no_rate_or_price_is_refused(rate, price, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        cost_per_thousand(rate, price)
