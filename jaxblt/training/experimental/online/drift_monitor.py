"""A monitor that tells when what is served becomes harder to predict than it was."""

import math
from collections.abc import Sequence

import numpy as np

from jaxblt.validation import number


class DriftMonitor:
    """Chart of a moving average of nats (EWMA, Roberts 1959), in standard deviations of its own.

    Attributes:
      mean, spread: of nats a row where nothing drifts.
      average: the moving average.
    """

    def __init__(self, nats: Sequence[float], *, decay: float = 0.9, limit: float = 4.0) -> None:
        """Take the mean and the standard deviation of nats of rows from before serving.

        Args:
          nats: of two rows or more, with a spread.
          decay: of the average; nearer to 1 finds smaller drifts, later.
          limit: deviations above the mean from which on `drifts` is true.
        """
        number("decay", decay, least=0, below=1)
        number("limit", limit, above=0)
        self.mean, self.spread = float(np.mean(nats)), float(np.std(nats))
        if not self.spread > 0:
            raise ValueError(
                f"nats of {len(nats)} rows have no spread to measure drift by, got {self.spread}: give different rows"
            )
        self.decay, self.limit, self.average = decay, limit, self.mean

    def watch(self, nats: Sequence[float]) -> float:
        """Take nats of rows that were served, in their order, and return the deviation of the average."""
        for value in nats:
            self.average = self.decay * self.average + (1 - self.decay) * float(value)
        return self.deviation

    @property
    def deviation(self) -> float:
        """Distance of the average from the mean, over the average's own standard deviation; NaN after NaN."""
        return (self.average - self.mean) / (self.spread * math.sqrt((1 - self.decay) / (1 + self.decay)))

    @property
    def drifts(self) -> bool:
        """True from the limit on, and for what is no number."""
        return not self.deviation < self.limit
