"""Recall over a gap: pairs of key and value, a stretch of other symbols, then the keys."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.validation import check_bounds


@dataclass(frozen=True, kw_only=True)
class GapRecall(GeneratedTask):
    """k_1 v_1 ... k_n v_n, then g fillers, then the keys in another order; at each its value is asked for.

    Keys, values and fillers are different symbols. If g is beyond the joint reach of windows of attention, a model
    without a memory is right by chance, 1 / values.

    Attributes:
      symbols: keys, and as many values.
      fillers: different symbols of the gap.
      pairs: of key and value (n).
      min_gap, gap: least and most fillers (g), a number drawn for each row.
    """

    symbols: int = 32
    fillers: int = 16
    pairs: int = 4
    min_gap: int = 1
    gap: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", "fillers", least=2)
        check_bounds(self, "pairs", least=1, most="symbols")
        check_bounds(self, "min_gap", least=1, most="gap")
        check_bounds(self, "gap", least=1)

    @property
    def vocab_size(self) -> int:
        return vocab_size(2 * self.symbols + self.fillers)

    @property
    def length(self) -> int:
        return 3 * self.pairs + self.gap

    def draw(self, draws: Draws) -> Example:
        keys, values = (draws.distinct(self.symbols, self.pairs) for _ in range(2))
        shown = np.stack([keys, self.symbols + values], 1).reshape(-1)
        filler = 2 * self.symbols + draws.below(self.fillers, draws.between(self.min_gap, self.gap))
        order = draws.distinct(self.pairs, self.pairs)
        stream = np.concatenate([shown, filler, keys[order]])
        targets = np.append(stream[1:], stream[-1])
        targets[-self.pairs :] = self.symbols + values[order]
        return Example(ids(stream), ids(targets), np.arange(len(stream)) >= len(stream) - self.pairs)
