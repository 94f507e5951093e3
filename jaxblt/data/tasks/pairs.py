"""Two texts and whether they belong together: "Retrieval" of Long Range Arena (2011.04006, sec. 2.3)."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import ending
from jaxblt.data.sources.opening import read_all
from jaxblt.data.splits import SplitName
from jaxblt.data.tasks.loaded import LoadedExamples, check_part
from jaxblt.data.vocab import VOCAB_SIZE, encode
from jaxblt.validation import check_bounds, check_fields

_PARTS = {"train": "train", "validation": "eval", "test": "test"}
_LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}
_COLUMNS = 5


@dataclass(frozen=True, kw_only=True)
class TextPairs:
    """The bytes of a text, EOS, those of another, EOS, and 1 or 0 as one byte: whether one cites the other.

    Reads the tables `*.train.tsv`, `*.eval.tsv` and `*.test.tsv` of the arena, also `.gz` or `.xz`: label, two numbers
    of papers and two texts, without a header. The arena's models read each text by itself; here one row holds both.
    All texts lie in memory.

    Attributes:
      path: the folder of the tables.
      max_bytes: of each text; what is longer loses its end. The arena keeps 4,000.
    """

    path: str
    max_bytes: int = 4000

    num_answers = 2

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "max_bytes", least=1)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def length(self) -> int:
        return 2 * self.max_bytes + 3

    def open(self, split: SplitName, *, seed: int = 0) -> LoadedExamples:
        """Open the pairs of a split.

        Raises:
          FileNotFoundError: the split's table is not there.
          ValueError: there are several, or a line has no label of 0 or 1 and four more columns.
        """
        check_part(split)
        files = expand(Path(self.path) / f"*.{_PARTS[split]}.tsv*")
        if len(files) > 1 or ending(files[0]) != ".tsv":
            raise ValueError(
                f"{self.path!r} must hold one table *.{_PARTS[split]}.tsv, or .tsv.gz or .tsv.xz, got "
                f"{', '.join(file.name for file in files)}"
            )
        questions, labels = _read(files[0], self.max_bytes)
        return LoadedExamples(questions, encode("".join(map(str, labels)).encode()))


def _read(file: Path, most: int) -> tuple[list[np.ndarray], list[int]]:
    questions, labels = [], []
    for number, line in enumerate(io.BytesIO(read_all(file)), start=1):
        label, *columns = line.removesuffix(b"\n").split(b"\t")
        if label not in _LABELS or len(columns) != _COLUMNS - 1:
            raise ValueError(
                f"{str(file)!r}, line {number} has {1 + len(columns)} columns and begins with {label!r:.40}, expected "
                f"0 or 1 and {_COLUMNS} columns"
            )
        first, second = columns[2:]
        row = np.concatenate([encode(first[:most], eos=True), encode(second[:most])])
        questions.append(row.astype(np.int16))
        labels.append(_LABELS[label])
    return questions, labels
