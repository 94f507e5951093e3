"""The interface of tasks to the pipeline: examples of questions whose answers are scored."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxblt.data.splits import SplitName
from jaxblt.data.vocab import BOS, EOS
from jaxblt.show import show


class Example(NamedTuple):
    """One row's content.

    Attributes:
      inputs: Int32[n], ids that the model reads.
      targets: Int32[n], the id asked for after each of them.
      scored: Bool[n], where the target is an answer.
    """

    inputs: np.ndarray
    targets: np.ndarray
    scored: np.ndarray

    __repr__ = show


def question_and_answer(question: np.ndarray, answer: np.ndarray) -> Example:
    """Return the stream BOS, question, EOS, answer.

    The answer is scored, and each answered id is read in turn.

    Args:
      question: Int32[q], ids.
      answer: Int32[a], ids, at least one.
    """
    asked = len(question)
    stream = np.empty(asked + len(answer) + 2, np.int32)
    stream[0], stream[1 : asked + 1], stream[asked + 1], stream[asked + 2 :] = BOS, question, EOS, answer
    scored = np.zeros(len(stream) - 1, bool)
    scored[asked + 1 :] = True
    return Example(stream[:-1], stream[1:], scored)


@runtime_checkable
class Examples(Protocol):
    """The examples of one split."""

    @property
    def count(self) -> int | None:
        """The number of examples; None without end."""
        ...

    @property
    def lengths(self) -> np.ndarray | None:
        """Int64[N], positions of each; None where they are known only once an example is made."""
        ...

    @property
    def groups(self) -> np.ndarray | None:
        """Int64[N], the subtask of each, an index of `group_names`; None without subtasks."""
        ...

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the subtasks."""
        ...

    def example(self, number: int) -> Example:
        """Return example `number`: the same whenever and wherever it is asked for.

        Raises:
          IndexError: there is no such example.
        """
        ...


@runtime_checkable
class TaskSource(Protocol):
    """The frozen config of a task: where its examples come from.

    Every answer follows from what the row shows up to its position, so that causal models can give it.

    A task whose rows have one answer may say as `num_answers` how many different ones there are. Labels (see
    `TaskDataConfig.labels`) are then 0..num_answers - 1.
    """

    @property
    def vocab_size(self) -> int:
        """Ids of its rows, the special ones included: at least those of bytes."""
        ...

    @property
    def length(self) -> int:
        """Positions of its longest example."""
        ...

    def open(self, split: SplitName, *, seed: int = 0) -> Examples:
        """Open the examples of a split.

        Args:
          split: "train", "validation" or "test".
          seed: picks the examples of an endless training split; no other split depends on it.

        Raises:
          ValueError: there is no such split, or bad data.
          FileNotFoundError: a path names no file.
        """
        ...
