"""Schedules of a pipeline: which stage does what at which tick.

A tick is one forward or one backward pass of a micro-batch through a stage. S stages and M micro-batches take
2 (M + S - 1) ticks, of which a stage works in 2 M. The rest is the bubble: (S - 1) / (M + S - 1).

    gpipe, S = 2, M = 3        F0 F1 F2 .. .. B0 B1 B2
                               .. F0 F1 F2 B0 B1 B2 ..
    1f1b, S = 2, M = 3         F0 F1 .. B0 F2 B1 .. B2
                               .. F0 B0 F1 B1 F2 B2 ..

Both take as long. `1f1b` holds as many micro-batches as there are stages, `gpipe` all.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from jaxblt.validation import check_bounds, check_fields

IDLE = -1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of forward and backward passes.

    Attributes:
      stages: S, how many devices a micro-batch passes.
      micro_batches: M.
      kind: "gpipe" runs all forward passes first, "1f1b" one backward pass as soon as there is one.

    Sources: Huang et al., arXiv 1811.06965 (GPipe); Narayanan et al., arXiv 1806.03377 (1F1B).
    """

    stages: int
    micro_batches: int
    kind: Literal["gpipe", "1f1b"] = "1f1b"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "stages", "micro_batches", least=1)

    @property
    def ticks(self) -> int:
        """Ticks from the first forward pass to the last backward pass."""
        return 2 * (self.micro_batches + self.stages - 1)

    def forward_at(self, stage: int, batch: int) -> int:
        """Return the tick of a micro-batch's forward pass through a stage."""
        # Begin at once as long as no backward pass has come back to the stage.
        early = self.kind == "gpipe" or batch < self.stages - stage
        return stage + batch if early else stage + 2 * batch

    def backward_at(self, stage: int, batch: int) -> int:
        """Return the tick of a micro-batch's backward pass: just behind that of the next stage."""
        if self.kind == "gpipe":
            return self.micro_batches + 2 * (self.stages - 1) - stage + batch
        return 2 * self.stages - 1 - stage + 2 * batch

    def forwards(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch that goes forward by tick and stage; `IDLE` if none does."""
        return self._table(self.forward_at)

    def backwards(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch that goes backward by tick and stage; `IDLE` if none does."""
        return self._table(self.backward_at)

    def arrivals(self) -> Int[np.ndarray, "ticks stages"]:
        """Return the micro-batch whose input came from the stage before by the begin of a tick."""
        came = np.full((self.ticks, self.stages), IDLE)
        came[1:, 1:] = self.forwards()[:-1, :-1]
        return came

    @property
    def bubble(self) -> float:
        """Share of ticks in which a stage is idle, counted."""
        idle = (self.forwards() == IDLE) & (self.backwards() == IDLE)
        return float(idle.mean())

    @property
    def slots(self) -> int:
        """The most inputs that a stage holds at a time: from their arrival to their backward pass."""
        ends = np.cumsum(self.backwards() != IDLE, 0) - (self.backwards() != IDLE)
        return max(1, int((np.cumsum(self.arrivals() != IDLE, 0) - ends)[:, 1:].max(initial=0)))

    def _table(self, at) -> Int[np.ndarray, "ticks stages"]:
        table = np.full((self.ticks, self.stages), IDLE)
        for stage in range(self.stages):
            for batch in range(self.micro_batches):
                table[at(stage, batch), stage] = batch
        return table
