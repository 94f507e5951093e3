"""A buffer of earlier rows: a uniform sample of all that was ever added, in fixed memory."""

import numpy as np
from jaxtyping import Int

from jaxblt.validation import whole


class ReplayBuffer:
    """Rows of ids, each kept with equal probability (reservoir sampling, Vitter 1985, algorithm R)."""

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        """Hold at most `capacity` rows."""
        whole("capacity", capacity, least=1, why=": nothing would be replayed")
        self.capacity = capacity
        self.seen = 0
        self.rows: list[np.ndarray] = []
        self._rng = np.random.default_rng(seed)

    def add(self, rows: Int[np.ndarray, "B T"]) -> None:
        """Offer rows of one length: while there is room all stay, then each takes a random place or none."""
        rows = np.asarray(rows)
        if self.rows and rows.shape[1:] != self.rows[0].shape:
            raise ValueError(
                f"rows have {rows.shape[1:]} ids, and the buffer holds rows of {self.rows[0].shape}: cut or fill them"
            )
        for row in rows:
            self.seen += 1
            if len(self.rows) < self.capacity:
                self.rows.append(row)
            elif (place := int(self._rng.integers(self.seen))) < self.capacity:
                self.rows[place] = row

    def draw(self, count: int) -> Int[np.ndarray, "N T"]:
        """Return so many rows, with repeats if the buffer holds fewer.

        Raises:
          ValueError: it is empty.
        """
        if not self.rows:
            raise ValueError("the buffer is empty: add rows before drawing")
        few = len(self.rows) < count
        return np.stack([self.rows[i] for i in self._rng.choice(len(self.rows), count, replace=few)])
