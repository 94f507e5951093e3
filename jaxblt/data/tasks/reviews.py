"""Classification of texts by their bytes, such as "Text" of Long Range Arena (2011.04006, sec. 2.2): IMDB reviews."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxblt.data.permutation import permute
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import ending
from jaxblt.data.sources.opening import read_all
from jaxblt.data.splits import SplitName
from jaxblt.data.tasks.loaded import LoadedExamples, check_any, check_part
from jaxblt.data.vocab import VOCAB_SIZE, encode
from jaxblt.validation import MOST_SEED, check_bounds, check_fields

VALIDATION_SHARE = 0.1
"""The share of the training texts for validation: the last tenth of a random order."""


@dataclass(frozen=True, kw_only=True)
class TextLabels:
    """The bytes of a text, EOS, and its label as one byte "0", "1", ... that a language model's head scores.

    Reads either of two layouts: folders `train/LABEL/*.txt` and `test/LABEL/*.txt`, as IMDB was released (Maas et al.
    2011), or tables `train*.tsv` and `test*.tsv`, also `.gz` or `.xz`, with the label first and the text last.

    Attributes:
      path: the folder that holds them.
      labels: their names; a label's number is its place among them.
      max_bytes: of a text; what is longer loses its end.
      split_seed: picks the texts for validation.
    """

    path: str
    labels: tuple[str, ...] = ("neg", "pos")
    max_bytes: int = 4096
    split_seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "max_bytes", least=1)
        check_bounds(self, "split_seed", least=0, most=MOST_SEED)
        if not 2 <= len(set(self.labels)) == len(self.labels) <= 10:
            raise ValueError(f"TextLabels.labels must be 2 to 10 different names, got {self.labels}")

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def num_answers(self) -> int:
        """One for each label."""
        return len(self.labels)

    @property
    def length(self) -> int:
        return self.max_bytes + 2

    def open(self, split: SplitName, *, seed: int = 0) -> LoadedExamples:
        """Open the texts of a split.

        Raises:
          FileNotFoundError: the folder holds neither layout.
          ValueError: a line of a table has no known label, a table is there twice, or there are fewer than ten training
            texts, of which validation takes a tenth.
        """
        check_part(split)
        texts = self._read("test" if split == "test" else "train")
        if split != "test":
            count = len(texts)
            first = count - int(VALIDATION_SHARE * count)
            places = range(first, count) if split == "validation" else range(first)
            texts = [texts[permute(place, count, self.split_seed)] for place in places]
            check_any(texts, split, self.path, f"a tenth of {count} training texts is none, it needs 10")
        questions = [encode(text[: self.max_bytes]).astype(np.int16) for text, _ in texts]
        answers = encode("".join(str(label) for _, label in texts).encode())
        return LoadedExamples(questions, answers)

    def _read(self, part: str) -> list[tuple[bytes, int]]:
        root = Path(self.path).expanduser()
        if (root / part).is_dir():
            files = [(file, n) for n, label in enumerate(self.labels) for file in _texts(root / part / label)]
            return [(read_all(file), n) for file, n in files]
        tables = expand(root / f"{part}*.tsv*")
        for file in tables:
            if ending(file) != ".tsv":
                raise ValueError(f"{str(file)!r} ends in none of .tsv, .tsv.gz and .tsv.xz: move it away")
        return [row for file in tables for row in self._table(file)]

    def _table(self, file: Path) -> list[tuple[bytes, int]]:
        numbers = {label.encode(): n for n, label in enumerate(self.labels)}
        rows = []
        for number, line in enumerate(read_all(file).removesuffix(b"\n").split(b"\n"), start=1):
            label, *columns = line.split(b"\t")
            if label not in numbers or not columns:
                raise ValueError(
                    f"{str(file)!r}, line {number} begins with {label!r:.40}, expected one of {self.labels} and a tab"
                )
            rows.append((columns[-1], numbers[label]))
        return rows


def _texts(folder: Path) -> list[Path]:
    return expand(folder / "*.txt")
