"""Pattern matching: does a pattern, given after a text, occur in the text?"""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.tasks.generated import GeneratedTask, ids, vocab_size
from jaxblt.validation import check_bounds


@dataclass(frozen=True, kw_only=True)
class PatternMatching(GeneratedTask):
    """A text of random symbols, a mark and a pattern; the answer is 1 if the text holds the pattern, else 0.

    Half of the patterns are pieces of their text. The others are drawn until they are none.

    Attributes:
      symbols: of the vocabulary; the mark is an id of its own behind them.
      text: symbols of the text.
      pattern: symbols of the pattern.
    """

    symbols: int = 8
    text: int = 64
    pattern: int = 4

    num_answers = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "symbols", least=2)
        check_bounds(self, "text", least=1)
        check_bounds(self, "pattern", least=1, most="text")
        if self.symbols**self.pattern < 2 * self.text:
            raise ValueError(
                f"PatternMatching.pattern must be longer: of {self.symbols}^{self.pattern} patterns a text of "
                f"{self.text} symbols may hold most, got pattern = {self.pattern}"
            )

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.symbols + 1)

    @property
    def length(self) -> int:
        return self.text + self.pattern + 3

    def draw(self, draws: Draws) -> Example:
        text = draws.below(self.symbols, self.text)
        is_piece = draws.between(0, 1)
        start = draws.between(0, self.text - self.pattern)
        pattern = text[start : start + self.pattern]
        if not is_piece:
            pattern = draws.below(self.symbols, self.pattern)
            while is_within(pattern, text):
                pattern = draws.below(self.symbols, self.pattern)
        question = np.concatenate([text, [self.symbols], pattern])
        return question_and_answer(ids(question), ids(np.array([is_piece])))


def is_within(pattern: np.ndarray, text: np.ndarray) -> bool:
    """Return whether `pattern` is a run of symbols of `text`."""
    runs = np.lib.stride_tricks.sliding_window_view(text, len(pattern))
    return bool((runs == pattern).all(1).any())
