"""A comparison of two programs in alternating rounds, with Welch's test of its trials."""

from dataclasses import dataclass

from jaxblt.profiling.history.welch import Welch, welch
from pallas_kernels import runtime


@dataclass(frozen=True)
class Comparison(runtime.Comparison):
    """Two functions in alternating rounds; ratio = median(first) / median(second) with its 95 % interval.

    Attributes:
      welch: test of the means of all trials, first - second, with the size of the effect. The ratio's interval
        resamples rounds. So it is narrower if a round disturbs both sides alike.
    """

    welch: Welch


def compare(
    first: runtime.Case,
    second: runtime.Case,
    *,
    rounds: int = runtime.MIN_TRIALS,
    warmup: int = 5,
    method: runtime.Method | None = None,
) -> Comparison:
    """Time two cases in alternating rounds, as `measure_all`, and compare them.

    Raises:
      ValueError: fewer than 20 rounds; or a slope asked of a function without array arguments.
      RuntimeError: no slope could be told from noise.
    """
    found = runtime.compare(first, second, rounds=rounds, warmup=warmup, method=method)
    test = welch(found.first.seconds, found.second.seconds)
    return Comparison(found.first, found.second, found.ratio, found.low, found.high, test)
