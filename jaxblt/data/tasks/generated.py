"""Tasks whose examples are drawn: an example's hash decides its split."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.splits import PARTS, SplitName
from jaxblt.data.tasks.loaded import check_part
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.validation import MOST_SEED, check_bounds, check_fields

SHARES = 8
"""The number of shares: one for validation, one for testing, and six for training."""
MOST_TRIES = 2000
"""Examples drawn for one row before a split is given up: a share that exists is missed with probability (7/8)^2000."""


def ids(symbols: np.ndarray) -> np.ndarray:
    """Return Int32, the ids of symbols 0, 1, ...: behind the special ids, as bytes are."""
    return symbols.astype(np.int32) + OFFSET


def vocab_size(symbols: int) -> int:
    """Count the ids of rows of so many symbols, special ones included.

    There are at least as many as of bytes.
    """
    return max(VOCAB_SIZE, OFFSET + symbols)


def part_of(example: Example) -> Literal["train", "validation", "test"]:
    """Return the one split that may hold an example, by a hash of what its row shows."""
    digest = hashlib.blake2b(example.inputs.astype("<i4").tobytes(), digest_size=8).digest()
    share = int.from_bytes(digest, "little") % SHARES
    return ("validation", "test")[share] if share < 2 else "train"


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(ABC):
    """The common base of drawn tasks. No example of one split is ever in another.

    Attributes:
      train_size: examples of a fixed training set; None draws new ones without end.
      eval_size: examples for validation, and as many for testing.
      sets_seed: picks the sets of fixed size; apart from the data's `seed`, which changes none of them.
    """

    train_size: int | None = None
    eval_size: int = 1000
    sets_seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "train_size", "eval_size", least=1)
        check_bounds(self, "sets_seed", least=0, most=MOST_SEED)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids of its rows."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Positions of its longest example."""

    @abstractmethod
    def draw(self, draws: Draws) -> Example:
        """Make an example of random numbers."""

    def open(self, split: SplitName, *, seed: int = 0) -> "GeneratedExamples":
        """Open the examples of a split; see `jaxblt.data.examples.TaskSource`.

        Raises:
          ValueError: there is no such split, or the task has so few different examples that the split has none.
        """
        check_part(split)
        count = self.train_size if split == "train" else self.eval_size
        examples = GeneratedExamples(self, split, count, seed if count is None else None)
        examples.example(0)  # a split that cannot be filled shows here
        return examples


@dataclass(frozen=True, eq=False)
class GeneratedExamples:
    """One split: example n is a pure function of task, split, seed and n.

    Those for validation and testing are drawn once and then kept, as they are asked for again and again.

    Attributes:
      task: its config.
      split: "train", "validation" or "test".
      count: examples; None without end.
      seed: of examples without end.
    """

    task: GeneratedTask
    split: SplitName
    count: int | None
    seed: int | None
    _kept: dict[int, Example] = field(default_factory=dict, init=False, repr=False)

    lengths = None
    groups = None
    group_names = ()

    def example(self, number: int) -> Example:
        if number < 0 or (self.count is not None and number >= self.count):
            raise IndexError(f"example {number} does not exist: split {self.split!r} has {self.count}")
        if number not in self._kept:
            example = self._draw(number)
            if self.split == "train":
                return example
            self._kept[number] = example
        return self._kept[number]

    def _draw(self, number: int) -> Example:
        stream = 0 if self.seed is None else 1 + self.seed
        draws = Draws(self.task.sets_seed, PARTS.index(self.split), stream, number)
        for _ in range(MOST_TRIES):
            example = self.task.draw(draws)
            if part_of(example) == self.split:
                return example
        raise ValueError(
            f"none of {MOST_TRIES} examples of {self.task} falls to split {self.split!r}: the task has too few "
            "different ones, make them longer"
        )
