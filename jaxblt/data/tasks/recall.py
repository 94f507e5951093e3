"""Multi-query associative recall: look up the values of keys seen before (MQAR; Arora et al. 2023, 2312.04927)."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.validation import check_bounds


@dataclass(frozen=True, kw_only=True)
class MQAR(GeneratedTask):
    """Pairs of key and value, then each key once more, at which its value is asked for.

    A row is k_1 v_1 ... k_n v_n, then queries among random symbols, as the paper's generator makes it. Query gaps g are
    drawn without replacement with chances that go by g^(a - 1), a = `power`: small ones are likely. Keys are different
    symbols of the lower half of the vocabulary and values of the upper half. Only queries are scored.

    Attributes:
      symbols: of the vocabulary, half of them keys.
      pairs: of key and value (n).
      positions: of a row (T).
      power: exponent of the gaps' distribution.
    """

    symbols: int = 8192
    pairs: int = 8
    positions: int = 64
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", least=2)
        check_bounds(self, "pairs", least=1)
        check_bounds(self, "positions", least=4)
        check_bounds(self, "power", above=0, most=1)
        if self.positions % 2 or 4 * self.pairs > self.positions:
            raise ValueError(
                f"MQAR.positions must be even and at least 4·pairs, got {self.positions} with pairs = {self.pairs}"
            )
        if self.symbols // 2 < self.pairs:
            raise ValueError(f"MQAR.symbols must be at least 2·pairs = {2 * self.pairs}, got {self.symbols}")

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.symbols)

    @property
    def length(self) -> int:
        return self.positions

    def draw(self, draws: Draws) -> Example:
        half, shown = self.symbols // 2, 2 * self.pairs
        keys = draws.distinct(half, self.pairs)
        values = half + draws.distinct(self.symbols - half, self.pairs)
        room = (self.positions - shown) // 2
        gaps = draws.weighted(np.arange(1, room + 1, dtype=np.float64) ** (self.power - 1), self.pairs)
        stream = draws.below(self.symbols, self.positions + 1)
        stream[0:shown:2], stream[1:shown:2] = keys, values
        places = shown + 2 * gaps
        stream[places] = keys
        targets = stream[1:].copy()
        targets[places] = values
        scored = np.zeros(self.positions, bool)
        scored[places] = True
        return Example(ids(stream[:-1]), ids(targets), scored)
