"""Examples that were read from files and lie in memory."""

from collections.abc import Sized
from dataclasses import dataclass

import numpy as np

from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.splits import PARTS, SplitName
from jaxblt.show import show


@dataclass(frozen=True, eq=False)
class LoadedExamples:
    """Questions with an answer of one id each.

    Attributes:
      questions: Int[q] ids of each, in the smallest type that holds them.
      answers: Int32[N], ids.
      groups: Int64[N], the subtask of each, or None.
      group_names: what the subtasks are called.
    """

    questions: list[np.ndarray]
    answers: np.ndarray
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()

    __repr__ = show

    @property
    def count(self) -> int:
        return len(self.questions)

    @property
    def lengths(self) -> np.ndarray:
        """Int64[N], positions of each: BOS, the question, EOS."""
        return np.array([len(question) + 2 for question in self.questions], np.int64)

    def example(self, number: int) -> Example:
        if not 0 <= number < self.count:
            raise IndexError(f"example {number} does not exist: there are {self.count}")
        return question_and_answer(self.questions[number], self.answers[number : number + 1])


def check_part(split: SplitName) -> None:
    """Raise ValueError unless `split` is one that a task has."""
    if split not in PARTS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(map(repr, PARTS))}")


def check_any(questions: Sized, split: SplitName, path: str, why: str) -> None:
    """Raise ValueError for a split without examples: a run would search for rows forever."""
    if not len(questions):
        raise ValueError(f"{path!r} gives no example for split {split!r}: {why}")
