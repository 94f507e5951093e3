"""When a run saves: every so many steps, and at the latest so many seconds after the last save."""

import time
from collections.abc import Callable


class SaveCadence:
    """Says at which steps a checkpoint is due; one that is due stays due until `saved`.

    Args:
      every: steps from one to the next.
      every_s: the most seconds from one to the next; None for no limit.
      clock: seconds.
    """

    def __init__(
        self, every: int, every_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.every, self.every_s = every, every_s
        self._clock, self._count = clock, 0
        self.saved()

    def saved(self) -> None:
        """Note that a checkpoint was saved."""
        self._since, self._due, self._count = self._clock(), False, self._count + 1

    @property
    def wanted(self) -> int:
        """The number of the save that is late by this process's clock; 0 for none."""
        late = self.every_s is not None and self._clock() - self._since >= self.every_s
        return self._count if late else 0

    def due(self, step: int, wanted: int) -> bool:
        """Return whether to save after `step`, given the largest `wanted` of all processes.

        It may be of a step ago, and then name a save that was made since.
        """
        self._due = self._due or step % self.every == 0 or wanted >= self._count
        return self._due
