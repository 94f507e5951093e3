"""bAbI: twenty kinds of questions about short stories (Weston et al. 2015, 1502.05698), from the released files."""

import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxblt.data.permutation import hash64
from jaxblt.data.splits import SplitName
from jaxblt.data.tasks.loaded import LoadedExamples, check_any, check_part
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE
from jaxblt.remote import refuse_remote
from jaxblt.validation import check_bounds, check_fields

TASKS = tuple(range(1, 21))
_FILE = re.compile(r"qa(\d+)_(?:.*_)?(train|valid|test)\.txt")
_WORD = re.compile(r"\w+|[.?]")
_HELD_OUT = 10

Part = Literal["train", "valid", "test"]


class Question(NamedTuple):
    """A question with what was told before it in its story.

    Attributes:
      story: number of its story in the file, from 0.
      sentences: the statements so far, then the question.
      answer: one word, also where it names several things ("milk,football").
    """

    story: int
    sentences: tuple[str, ...]
    answer: str


@dataclass(frozen=True, kw_only=True)
class Babi:
    """Statements and a question as word ids; the answer is one id. Supporting facts are not used.

    Words are numbered in alphabetical order, over all files of the subset. The files' own split is used. Where there
    are no files for validation (`en-valid` has them), a tenth of each task's training stories is, chosen by a hash.

    Attributes:
      path: the folder of the release or of one subset, or a tar archive of it.
      subset: the folder of the release, such as "en" (1,000 questions a task) or "en-10k".
      tasks: which of the twenty, trained jointly; one for a model of its own.
      max_words: of a row; the earliest words of longer stories are left out. The longest English story has 1,360.
    """

    path: str
    subset: str = "en"
    tasks: tuple[int, ...] = TASKS
    max_words: int = 1360

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "max_words", least=1)
        check_bounds(self, "tasks", least=1, most=20)
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"Babi.tasks must name different tasks of 1..20, at least one, got {self.tasks}")

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def length(self) -> int:
        return self.max_words + 2

    def open(self, split: SplitName, *, seed: int = 0) -> LoadedExamples:
        """Open the questions of a split, task after task; `groups` are indices of `tasks`.

        Raises:
          FileNotFoundError: the subset, or a file of one of the tasks, is not there.
          ValueError: a file is no text, a line is no numbered sentence, a question has no answer, there are more words
            than ids, or a task has no question in the split.
        """
        check_part(split)
        files = read_subset(self.path, self.subset)
        vocabulary = Vocabulary(files.values(), self.path)
        questions, answers, groups = [], [], []
        for group, task in enumerate(self.tasks):
            asked = split_questions(files, task, split, self.path, self.subset)
            check_any(asked, split, self.path, f"the file of task {task} holds too few stories")
            for question in asked:
                words = np.concatenate([vocabulary.sentence(said) for said in question.sentences])
                questions.append(words[-self.max_words :])
                answers.append(vocabulary.ids[question.answer])
                groups.append(group)
        names = tuple(f"qa{task}" for task in self.tasks)
        return LoadedExamples(questions, np.array(answers, np.int32), np.array(groups, np.int64), names)


def split_questions(
    files: dict[tuple[int, Part], str], task: int, split: SplitName, path: str, subset: str
) -> list[Question]:
    """Return the questions of one task in a split, of files as `read_subset` gives them.

    Raises:
      FileNotFoundError: the file with them is not there.
      ValueError: a line is no numbered sentence, or a question has no answer.
    """
    has_valid = (task, "valid") in files
    part: Part = "test" if split == "test" else "valid" if split == "validation" and has_valid else "train"
    if (task, part) not in files:
        raise FileNotFoundError(
            f"{path!r} has no qa{task}_*_{part}.txt of subset {subset!r}: add the file, or leave task "
            f"{task} out of data.task.tasks"
        )
    found = list(read_questions(files[task, part], f"qa{task} {part}"))
    if split == "test" or has_valid:
        return found
    held_out = split == "validation"
    return [q for q in found if (hash64(task, q.story) % _HELD_OUT == 0) == held_out]


def read_subset(path: str, subset: str) -> dict[tuple[int, Part], str]:
    """Read the text of each file of a subset, by task and part.

    Raises:
      FileNotFoundError: there is no such path, or it holds no file of that subset.
      ValueError: the path is a file, but no tar archive; or it holds a file of that subset twice, or one that is no
        text.
    """
    refuse_remote("data.task.path", path)
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(
            f"{path!r} does not exist: set data.task.path to bAbI's folder or tar archive"
        )
    found: dict[tuple[int, Part], str] = {}
    for (task, part), raw in _read_folder(root, subset) if root.is_dir() else _read_archive(root, subset):
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path!r}, {subset}/qa{task}_*_{part}.txt is no text ({error}): copy it again"
            ) from error
        if found.setdefault((task, part), text) is not text:
            raise ValueError(
                f"{path!r} holds {subset}/qa{task}_*_{part}.txt twice: leave one copy of bAbI in it"
            )
    if not found:
        raise FileNotFoundError(
            f"{path!r} holds no files {subset}/qa*_train.txt: check data.task.subset = {subset!r}"
        )
    return found


def _read_folder(root: Path, subset: str) -> Iterator[tuple[tuple[int, Part], bytes]]:
    for file in sorted(root.resolve().rglob("qa*.txt")):
        if file.parent.name == subset and (key := _key(file.name)):
            yield key, file.read_bytes()


def _read_archive(root: Path, subset: str) -> Iterator[tuple[tuple[int, Part], bytes]]:
    try:
        with tarfile.open(root) as archive:
            for member in archive:
                name = Path(member.name)
                if (
                    name.parent.name == subset
                    and (key := _key(name.name))
                    and (file := archive.extractfile(member))
                ):
                    yield key, file.read()
    except tarfile.ReadError as error:
        raise ValueError(
            f"{str(root)!r} is no tar archive ({error}): name bAbI's folder or archive"
        ) from error


def _key(name: str) -> tuple[int, Part] | None:
    match = _FILE.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])  # pyright: ignore[reportReturnType]


def read_questions(text: str, where: str) -> Iterator[Question]:
    """Yield the questions of a file in order, each with what its story told before it.

    Args:
      text: lines "number sentence" or "number question TAB answer TAB facts"; numbers restart with each story.
      where: named in errors.

    Raises:
      ValueError: a line is none of the two, or the first one's number is not 1.
    """
    story, told = -1, []
    for number, line in enumerate(text.splitlines(), start=1):
        index, _, said = line.partition(" ")
        if not index.isdigit() or not said:
            raise ValueError(f"bAbI {where}, line {number}: {line!r:.60}, expected a number and a sentence")
        if index == "1":
            story, told = story + 1, []
        if story < 0:
            raise ValueError(
                f"bAbI {where}, line 1: {line!r:.60}, expected number 1: its story has no beginning"
            )
        sentence, *answer = said.split("\t")
        if answer and not answer[0].strip():
            raise ValueError(f"bAbI {where}, line {number}: {line!r:.60}, expected an answer between tabs")
        if answer:
            yield Question(story, (*told, sentence), answer[0].strip().lower())
        else:
            told.append(sentence)


class Vocabulary:
    """Ids of words and of answers, in alphabetical order.

    Args:
      texts: of all files of a subset, so that ids do not depend on the tasks that are chosen.
      path: named in the error.

    Attributes:
      ids: of each word and answer, in lower case.

    Raises:
      ValueError: there are more words than ids.
    """

    def __init__(self, texts: Iterable[str], path: str) -> None:
        lines = {line.partition(" ")[2].partition("\t")[::2] for text in texts for line in text.splitlines()}
        words = {word for sentence, _ in lines for word in split_words(sentence)}
        words |= {rest.partition("\t")[0].strip().lower() for _, rest in lines if rest}
        if len(words) > VOCAB_SIZE - OFFSET:
            most = VOCAB_SIZE - OFFSET
            raise ValueError(f"{path!r} holds {len(words)} different words, more than {most}: is it bAbI?")
        self.ids = {word: OFFSET + number for number, word in enumerate(sorted(words))}
        self._sentences: dict[str, np.ndarray] = {}

    def sentence(self, said: str) -> np.ndarray:
        """Return the ids of a sentence, Int16.

        Keep them: few sentences are said only once.
        """
        if said not in self._sentences:
            self._sentences[said] = np.array([self.ids[word] for word in split_words(said)], np.int16)
        return self._sentences[said]


def split_words(sentence: str) -> list[str]:
    """Split a sentence into words, full stops and question marks, in lower case."""
    return _WORD.findall(sentence.lower())
