"""Parity: is the number of ones odd? The simplest state that has to be tracked without an error."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.data.vocab import BOS
from jaxblt.validation import check_bounds


@dataclass(frozen=True, kw_only=True)
class Parity(GeneratedTask):
    """Random bits, and their sum modulo 2 as the answer.

    Attributes:
      min_bits, max_bits: of a row, a number drawn for each.
      prefixes: ask after every bit for the parity of the bits so far, instead of once behind the last.
    """

    min_bits: int = 8
    max_bits: int = 32
    prefixes: bool = False

    num_answers = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "min_bits", least=1, most="max_bits")
        check_bounds(self, "max_bits", least=1)

    @property
    def vocab_size(self) -> int:
        return vocab_size(2)

    @property
    def length(self) -> int:
        return self.max_bits + (1 if self.prefixes else 2)

    def draw(self, draws: Draws) -> Example:
        bits = draws.below(2, draws.between(self.min_bits, self.max_bits))
        parities = np.cumsum(bits) % 2
        if not self.prefixes:
            return question_and_answer(ids(bits), ids(parities[-1:]))
        inputs = np.append(np.int32(BOS), ids(bits))
        targets = np.append(inputs[1], ids(parities))
        return Example(inputs, targets, np.arange(len(inputs)) > 0)
