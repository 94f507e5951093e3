"""Copy and repeat-copy: write again what was read (Graves et al. 2014, 1410.5401, sec. 4.1 and 4.2)."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.data.vocab import EOS
from jaxblt.validation import check_bounds


@dataclass(frozen=True, kw_only=True)
class Copy(GeneratedTask):
    """Random symbols, EOS, and the same symbols as the answer.

    Attributes:
      symbols: of the vocabulary.
      min_symbols, max_symbols: to be copied, a number drawn for each row.
    """

    symbols: int = 16
    min_symbols: int = 1
    max_symbols: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", least=2)
        check_bounds(self, "min_symbols", least=1, most="max_symbols")
        check_bounds(self, "max_symbols", least=1)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.symbols)

    @property
    def length(self) -> int:
        return 2 * self.max_symbols + 1

    def draw(self, draws: Draws) -> Example:
        shown = ids(draws.below(self.symbols, draws.between(self.min_symbols, self.max_symbols)))
        return question_and_answer(shown, shown)


@dataclass(frozen=True, kw_only=True)
class RepeatCopy(GeneratedTask):
    """Random symbols and a number r; the answer is the symbols r times, and EOS, so that r has to be counted.

    Attributes:
      symbols: of the vocabulary; the numbers 1..max_repeats are ids of their own behind them.
      min_symbols, max_symbols: to be copied, a number drawn for each row.
      max_repeats: the largest r.
    """

    symbols: int = 16
    min_symbols: int = 1
    max_symbols: int = 10
    max_repeats: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", least=2)
        check_bounds(self, "min_symbols", least=1, most="max_symbols")
        check_bounds(self, "max_symbols", "max_repeats", least=1)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.symbols + self.max_repeats)

    @property
    def length(self) -> int:
        return self.max_symbols * (self.max_repeats + 1) + 3

    def draw(self, draws: Draws) -> Example:
        shown = ids(draws.below(self.symbols, draws.between(self.min_symbols, self.max_symbols)))
        repeats = draws.between(1, self.max_repeats)
        number = ids(np.array([self.symbols + repeats - 1]))
        answer = np.append(np.tile(shown, repeats), np.int32(EOS))
        return question_and_answer(np.append(shown, number), answer)
