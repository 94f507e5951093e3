"""The sentences of books, cut where a full stop, an exclamation or a question mark is followed by white space."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import read_all
from jaxblt.data.splits import SplitName

_END = re.compile(rb"(?<=[.!?])\s+")


class Sentences:
    """The sentences of some texts, one after another, with one space between words and behind each.

    Args:
      texts: bytes of each text.
      path: where they come from, named in errors.

    Attributes:
      text: all of them.
      starts: Int64[N + 1], where each begins, and where the last ends.
    """

    def __init__(self, texts: Sequence[bytes], path: str) -> None:
        found = [
            b" ".join(said.split()) + b" " for text in texts for said in _END.split(text) if said.strip()
        ]
        self.text, self.path = b"".join(found), path
        self.starts = np.cumsum([0, *map(len, found)], dtype=np.int64)

    def around(self, facts: Sequence[bytes], size: int, draws: Draws) -> bytes:
        """Return neighbouring sentences of at most `size` bytes, with facts at random places.

        Raises:
          ValueError: there are fewer bytes than that.
        """
        if len(self.text) < size:
            raise ValueError(
                f"{self.path!r} holds {len(self.text)} bytes, fewer than the {size} of a row: add books"
            )
        last = int(np.searchsorted(self.starts, len(self.text) - size, side="right")) - 1
        first = draws.between(0, last)
        end = int(np.searchsorted(self.starts, self.starts[first] + size, side="right")) - 1
        places = np.sort(draws.below(end - first + 1, len(facts))) + first
        cuts = self.starts[[first, *places, end]]
        stretches = [self.text[cut:until] for cut, until in pairwise(cuts)]
        return b"".join(part for pair in zip(stretches, [*facts, b""], strict=True) for part in pair)


def read_sentences(folder: str, split: SplitName) -> Sentences:
    """Read the sentences of one split of books in train/*.txt, validation/*.txt and test/*.txt.

    Raises:
      FileNotFoundError: that part holds no book.
    """
    files = expand(Path(folder) / split / "*.txt")
    return Sentences([read_all(file) for file in files], f"{folder}/{split}")
