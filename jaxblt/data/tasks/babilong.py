"""Facts and questions of bAbI among sentences of books, after BABILong (Kuratov et al. 2024, 2406.10149, sec. 2)."""

from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example, question_and_answer
from jaxblt.data.splits import PARTS, SplitName
from jaxblt.data.tasks.babi import TASKS, read_questions, read_subset, split_questions
from jaxblt.data.tasks.loaded import check_part
from jaxblt.data.tasks.sentences import Sentences, read_sentences
from jaxblt.data.vocab import VOCAB_SIZE, encode
from jaxblt.validation import check_bounds, check_fields

MOST_ANSWERS = 10
"""Digits that an answer is one of."""


@dataclass(frozen=True, kw_only=True)
class Babilong:
    """The bytes of a story scattered over a book, its question, EOS, and the answer as one byte "0", "1", ...

    The statements stand in order at random places between neighbouring sentences of books. An answer's number is its
    place in the alphabetical order of the task's answers. Books of one split are in no other. Stories keep
    bAbI's split, in which some of the test questions also occur in training. Not BABILong's own files: compare models
    on it with each other.

    Attributes:
      path: bAbI's folder or tar archive, as of `Babi`.
      books: a folder of train/*.txt, validation/*.txt and test/*.txt.
      subset: of bAbI.
      task: of bAbI, with at most ten different answers: 1 and 2 ask for one of six places.
      min_bytes, max_bytes: of story, sentences and question; a size is drawn for each row, evenly in its logarithm. A
        story of more than the drawn size stands alone, and one of more than `max_bytes` is left out.
      eval_size: rows for validation, and as many for testing.
    """

    path: str
    books: str
    subset: str = "en-10k"
    task: int = 1
    min_bytes: int = 1024
    max_bytes: int = 1024
    eval_size: int = 1000

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "task", least=1, most=len(TASKS))
        check_bounds(self, "min_bytes", least=1, most="max_bytes")
        check_bounds(self, "max_bytes", "eval_size", least=1)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def length(self) -> int:
        return self.max_bytes + 2

    def open(self, split: SplitName, *, seed: int = 0) -> "BabilongExamples":
        """Open the rows of a split; those for training have no end.

        Raises:
          FileNotFoundError: the subset, a file of the task, or books are not there.
          ValueError: a line is no numbered sentence, the answers are too many, or no story is short enough.
        """
        check_part(split)
        files = read_subset(self.path, self.subset)
        questions = split_questions(files, self.task, split, self.path, self.subset)
        texts = [(part, text) for (task, part), text in files.items() if task == self.task]
        answers = sorted(
            {q.answer for part, text in texts for q in read_questions(text, f"qa{self.task} {part}")}
        )
        if len(answers) > MOST_ANSWERS:
            raise ValueError(
                f"task {self.task} has {len(answers)} different answers, of which one digit tells {MOST_ANSWERS}: "
                "choose another, such as 1"
            )
        told = (tuple(said.strip().encode() for said in q.sentences) for q in questions)
        stories = [Story(said, answers.index(q.answer)) for said, q in zip(told, questions, strict=True)]
        short = [story for story in stories if story.size <= self.max_bytes]
        if not short:
            least = min(story.size for story in stories)
            raise ValueError(
                f"max_bytes = {self.max_bytes} holds no story of task {self.task}: set at least {least}"
            )
        return BabilongExamples(self, split, seed, tuple(short), read_sentences(self.books, split))


class Story(NamedTuple):
    """A story: its facts and its question.

    Attributes:
      said: the statements, then the question.
      answer: its number.
    """

    said: tuple[bytes, ...]
    answer: int

    @property
    def size(self) -> int:
        """Bytes, with a space between any two."""
        return sum(map(len, self.said)) + len(self.said) - 1


@dataclass(frozen=True, eq=False)
class BabilongExamples:
    """One split: example n is a pure function of task, split, seed and n.

    Attributes:
      task: its config.
      split: "train", "validation" or "test".
      seed: of examples for training.
      stories: those that are short enough.
      sentences: of the split's books.
    """

    task: Babilong
    split: SplitName
    seed: int
    stories: tuple[Story, ...]
    sentences: Sentences

    lengths = None
    groups = None
    group_names = ()

    @property
    def count(self) -> int | None:
        return None if self.split == "train" else self.task.eval_size

    def example(self, number: int) -> Example:
        if number < 0 or (self.count is not None and number >= self.count):
            raise IndexError(f"example {number} does not exist: split {self.split!r} has {self.count}")
        draws = Draws(PARTS.index(self.split), self.seed if self.count is None else 0, number)
        evenly = number * len(self.stories) // self.task.eval_size
        story = self.stories[draws.between(0, len(self.stories) - 1) if self.count is None else evenly]
        low, high = log(self.task.min_bytes), log(self.task.max_bytes)
        size = round(exp(low + (high - low) * float(draws.uniform(1)[0])))
        *facts, question = story.said
        told = self.sentences.around([fact + b" " for fact in facts], max(size - story.size, 0), draws)
        return question_and_answer(encode(told + question), encode(str(story.answer).encode()))
