"""When a run saves: every so many steps, and at the latest so many seconds after the last save."""

import time
from collections.abc import Callable

from jaxblt.training.preemption import agreed


class SaveCadence:
    """Says at which steps a checkpoint is due; one that is due stays due until `saved`.

    Args:
      every: steps from one to the next.
      every_s: the most seconds from one to the next; None for no limit.
      ask_every: several processes compare their clocks only at steps that are a multiple of it, see `agreed`.
      clock: seconds.
    """

    def __init__(
        self,
        every: int,
        every_s: float | None,
        *,
        ask_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every, self.every_s, self.ask_every = every, every_s, ask_every
        self._clock = clock
        self.saved()

    def saved(self) -> None:
        """Notes that a checkpoint was saved."""
        self._since, self._due = self._clock(), False

    def due(self, step: int) -> bool:
        """Whether to save after `step`; all processes must ask at every step, and all get one answer."""
        late = self.every_s is not None and self._clock() - self._since >= self.every_s
        self._due = self._due or step % self.every == 0 or agreed(late, step, self.ask_every)
        return self._due
