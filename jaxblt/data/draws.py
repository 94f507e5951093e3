"""Random numbers as pure functions of a key, the same on every platform and with every version of numpy."""

import numpy as np

from jaxblt.data.permutation import hash64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draws:
    """A stream of random numbers that a key picks; each call takes the next ones.

    Word n is the splitmix64 finaliser of key + (n + 1)·golden (Steele, Lea, Flood 2014, fig. 14).

    Args:
      key: whole numbers; streams of different keys are independent.
    """

    def __init__(self, *key: int) -> None:
        self._start, self._taken = hash64(*key), 0

    def words(self, count: int) -> np.ndarray:
        """Return UInt64[count], all bits random."""
        turns = np.arange(self._taken + 1, self._taken + 1 + count, dtype=np.uint64)
        self._taken += count
        x = turns * _GOLDEN + np.uint64(self._start)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    def below(self, limit: int, count: int) -> np.ndarray:
        """Return Int32[count], each uniform in 0..limit - 1 (up to a bias of limit / 2^64)."""
        return (self.words(count) % np.uint64(limit)).astype(np.int32)

    def between(self, low: int, high: int) -> int:
        """Return one whole number, uniform in low..high."""
        return low + int(self.below(high - low + 1, 1)[0])

    def uniform(self, count: int) -> np.ndarray:
        """Return Float64[count], uniform in [0, 1)."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def distinct(self, limit: int, count: int) -> np.ndarray:
        """Return Int32[count], different numbers of 0..limit - 1, in random order."""
        if 4 * count > limit:
            return np.argsort(self.words(limit), kind="stable")[:count].astype(np.int32)
        found = np.zeros(0, np.int32)
        while len(found) < count:  # few are drawn twice
            found = np.append(found, self.below(limit, count))
            found = found[np.sort(np.unique(found, return_index=True)[1])]
        return found[:count]

    def weighted(self, weights: np.ndarray, count: int) -> np.ndarray:
        """Draw different indices, Int32[count], one by one with chances that follow `weights`.

        The indices win an exponential race: the first `count` of independent arrivals at these rates (Efraimidis,
        Spirakis 2006).
        """
        arrivals = -np.log1p(-self.uniform(len(weights))) / weights
        return np.argsort(arrivals, kind="stable")[:count].astype(np.int32)
