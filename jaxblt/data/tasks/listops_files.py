"""ListOps in the files that Long Range Arena released: basic_train.tsv, basic_val.tsv and basic_test.tsv."""

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, Examples, question_and_answer
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import read_all
from jaxblt.data.splits import SplitName
from jaxblt.data.tasks.generated import GeneratedExamples, ids, vocab_size
from jaxblt.data.tasks.listops import (
    SYMBOLS,
    ListOps,
    evaluate,
    is_whole,
    parse,
    reorder,
    show,
)
from jaxblt.data.tasks.loaded import LoadedExamples, check_any, check_part
from jaxblt.data.vocab import OFFSET
from jaxblt.validation import check_bounds, check_fields

_FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
MOST_ORDERS = 1024
"""The most orders that are kept. Of 96,000 expressions they are 98 million lengths of eight bytes."""
CHECKED = 1000
"""Expressions of a file that are evaluated, at equal distances: to evaluate all takes as long as to read them."""


@dataclass(frozen=True, kw_only=True)
class ListOpsFiles:
    """Expressions with the answers that stand beside them.

    Attributes:
      path: the folder of the three files.
      max_symbols: longer expressions are cut off behind so many, as the arena does.
      orders: of arguments in which each training expression is shown; operators take theirs in any order. The brackets
        of all are checked then.
    """

    path: str
    max_symbols: int = 2000
    orders: int = 1

    num_answers = 10

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "max_symbols", "orders", least=1)
        check_bounds(self, "orders", most=MOST_ORDERS, why=": their lengths are held in memory")

    @property
    def vocab_size(self) -> int:
        return vocab_size(len(SYMBOLS))

    @property
    def length(self) -> int:
        return self.max_symbols + 2

    def open(self, split: SplitName, *, seed: int = 0) -> Examples:
        """Open the expressions of a split.

        Raises:
          FileNotFoundError: the split's file is not there.
          ValueError: a line does not hold an expression and a digit, or of those that are evaluated one is not balanced
            or has another answer, or with `orders` any has wrong brackets; the message names it. Or there is no line.
        """
        check_part(split)
        (file,) = expand(Path(self.path) / _FILES[split])
        questions, answers = read_tsv(file)
        check_any(questions, split, str(file), "write expressions behind its first line")
        if split == "train" and self.orders > 1:
            check_whole(file, questions)
        check_answers(file, questions, answers)
        if split == "train" and self.orders > 1:
            return Reordered(questions, answers, self.max_symbols, self.orders, seed)
        return LoadedExamples([q[: self.max_symbols] for q in questions], answers)


@dataclass(frozen=True, eq=False)
class Reordered:
    """Expressions in several orders of their arguments, made when an example is asked for; the first is the file's.

    Attributes:
      questions: Int[q] ids of each expression.
      answers: Int32[N], ids.
      max_symbols: what is shown of an expression.
      orders: of each.
      seed: picks them.
      groups, group_names: there are no subtasks.
    """

    questions: list[np.ndarray]
    answers: np.ndarray
    max_symbols: int
    orders: int
    seed: int

    groups = None
    group_names = ()

    @property
    def count(self) -> int:
        return len(self.questions) * self.orders

    @property
    def lengths(self) -> np.ndarray:
        """Int64[N orders], positions of each: BOS, the question, EOS."""
        once = [min(len(question), self.max_symbols) + 2 for question in self.questions]
        return np.tile(np.array(once, np.int64), self.orders)

    def example(self, number: int) -> Example:
        if not 0 <= number < self.count:
            raise IndexError(f"example {number} does not exist: there are {self.count}")
        order, place = divmod(number, len(self.questions))
        question = self.questions[place]
        if order:
            question = ids(reorder(question - OFFSET, Draws(self.seed, number)))
        return question_and_answer(question[: self.max_symbols], self.answers[place : place + 1])


def read_tsv(file: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Read ids of the expressions in a file, and of their answers, by its header.

    Raises:
      ValueError: there is no header of "Source" and "Target", or a line does not hold an expression and a digit.
    """
    try:
        header, *lines = read_all(file).decode().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is no text ({error}): copy it again") from error
    columns = header.split("\t")
    if sorted(columns) != ["Source", "Target"]:
        raise ValueError(f"{str(file)!r} begins with {header!r:.60}, expected the columns Source and Target")
    source, target = columns.index("Source"), columns.index("Target")
    questions, answers = [], []
    for number, line in enumerate(lines, start=2):
        cells = line.split("\t")
        if len(cells) != 2 or cells[target] not in list("0123456789"):
            raise ValueError(
                f"{str(file)!r}, line {number}: {line!r:.60}, expected an expression and a digit"
            )
        try:
            questions.append(ids(np.array(parse(cells[source]), np.uint8)))
        except ValueError as error:
            raise ValueError(f"{str(file)!r}, line {number}: {error}") from error
        answers.append(int(cells[target]))
    return questions, ids(np.array(answers))


def check_whole(file: Path, questions: list[np.ndarray]) -> None:
    """Check that each is one whole expression, which `reorder` takes for granted.

    Raises:
      ValueError: one is not; the message names the line.
    """
    for line, question in enumerate(questions, start=2):
        if not is_whole(question.astype(int) - OFFSET):
            shown = show((question.astype(int) - OFFSET).tolist())
            raise ValueError(f"{str(file)!r}, line {line}: not one whole expression: {shown:.80}")


def check_answers(file: Path, questions: list[np.ndarray], answers: np.ndarray, most: int = CHECKED) -> None:
    """Evaluate at most so many expressions of a file, and compare their answers.

    They are as `read_tsv` returns them.

    Raises:
      ValueError: an expression is not balanced, or its answer is another; the message names the line.
    """
    for number in np.linspace(0, len(questions) - 1, min(most, len(questions))).astype(int):
        try:
            found = evaluate((questions[number].astype(int) - OFFSET).tolist())
        except ValueError as error:
            raise ValueError(f"{str(file)!r}, line {number + 2}: {error}") from error
        if found != answers[number] - OFFSET:
            raise ValueError(
                f"{str(file)!r}, line {number + 2}: its expression comes to {found}, its answer is "
                f"{answers[number] - OFFSET}: it is no file of ListOps"
            )


def write_files(task: ListOps, folder: Path, processes: int | None = None) -> None:
    """Write the three files of a task with a fixed training set; a file that is there stays.

    Args:
      task: what is drawn.
      folder: for the files; it is made.
      processes: that draw; None for one on each core.

    Raises:
      ValueError: the training set has no size.
    """
    if task.train_size is None:
        raise ValueError(
            "write_files needs a training set of fixed size: set ListOps.train_size, such as 96_000"
        )
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[SplitName, int] = {
        "train": task.train_size,
        "validation": task.eval_size,
        "test": task.eval_size,
    }
    processes = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for split, size in sizes.items():
            lines = partial(pool.map, chunksize=64) if processes > 1 else map
            _write(folder / _FILES[split], partial(_line, task.open(split)), size, lines)


def _write(file: Path, line: Callable[[int], str], size: int, each: Callable[..., Iterable[str]]) -> None:
    if file.exists():
        return
    part = file.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        out.write("Source\tTarget\n")
        out.writelines(each(line, range(size)))
    part.replace(file)


def _line(examples: GeneratedExamples, number: int) -> str:
    inputs, targets, scored = examples.example(number)
    (answer,) = targets[scored] - OFFSET
    return f"{show((inputs[1:-1] - OFFSET).tolist())}\t{answer}\n"
