"""The price of answers, from a measured rate and the price of the machine."""

from jaxblt.validation import number

PER_HOUR_S = 3600


def cost_per_thousand(samples_per_second: float, price_per_hour: float) -> float:
    """Return the price of 1,000 samples: 1,000 / rate seconds of a machine that costs so much an hour.

    Args:
      samples_per_second: as measured on that machine, in whatever a sample is.
      price_per_hour: of the machine, in any currency, in which the price is returned.

    Raises:
      ValueError: the rate is not above 0, or the price is below 0.
    """
    number("samples_per_second", samples_per_second, above=0)
    number("price_per_hour", price_per_hour, least=0)
    return 1000 / samples_per_second * price_per_hour / PER_HOUR_S
