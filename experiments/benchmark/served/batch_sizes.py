"""Delay, rate and price by the rows of a batch: python -m experiments.benchmark batch_sizes --out FILE."""

from itertools import pairwise
from typing import Any

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.models.serving import drawn_model
from experiments.benchmark.models.written_bytes import CAPACITY, Written, delays


def batch_sizes(
    out: str = "runs/benchmark/batch_sizes.json",
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64),
    new_bytes: int = 64,
    price_per_hour: float | None = None,
    pattern: str = "HHAH",
    trials: int = 20,
    tiny: bool = False,
) -> dict[str, Any]:
    """Time batches of the `books` model in bf16, by their rows: delay, delay a sample, samples a second, and price.

    A sample is a row of `new_bytes` bytes, decoded one by one. Rates have the 95 % interval of the median time. A rate
    falls where its interval lies below that of the batch before it.

    Args:
      out: JSON file to write.
      rows: of the batches, ascending.
      new_bytes: of a row.
      price_per_hour: of the machine; None for no prices.
      pattern: of the latent stack.
      trials: of each timing, at least 20.
      tiny: a model that a CPU compiles, to try the script.
    """
    decoder, params = drawn_model(pattern, tiny)
    found: dict[str, Any] = {"new_bytes": new_bytes, "capacity": CAPACITY, "pattern": pattern}
    found |= {"price_per_hour": price_per_hour, "batches": []}
    for count in rows:
        written = Written(decoder, params, count, new_bytes)
        found["batches"].append(_figures(written.time(written.write, trials), count, price_per_hour))
        found["falls_at"] = [
            more["rows"]
            for less, more in pairwise(found["batches"])
            if _rate(more)["high"] < _rate(less)["low"]
        ]
        save("batch_sizes", out, found)
    return found


def _rate(figures: dict[str, Any]) -> dict[str, float]:
    return figures["samples_per_second"]


def _figures(measured: Any, rows: int, price_per_hour: float | None) -> dict[str, Any]:
    """Return the figures of a batch."""
    from jaxblt.profiling import cost_per_thousand

    times = timed(measured)
    rates = {"median": rows / times["median"], "low": rows / times["high"], "high": rows / times["low"]}
    figures = {"rows": rows, "seconds": times, **delays(measured.seconds)}
    figures |= {"ms_a_sample": 1e3 * times["median"] / rows, "samples_per_second": rates}
    if price_per_hour is not None:
        slower = {"median": "median", "low": "high", "high": "low"}
        figures["price_per_thousand"] = {
            name: cost_per_thousand(rates[other], price_per_hour) for name, other in slower.items()
        }
    return figures
