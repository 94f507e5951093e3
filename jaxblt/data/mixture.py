"""Several sources in one run: their configs, their documents one after the other, and rows of one source each."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxblt.data.rows import RowIndex, Span
from jaxblt.data.sources.base import DocumentSource, check_range, document_ends
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields

Kind = Literal["text", "jsonl", "fasta", "arrow", "bytes"]
"""The way files of documents are read."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture, with documents as in a `DataConfig`; a row holds documents of one source.

    Attributes:
      name: of the source, in figures: "genome/bits_per_byte".
      weight: its share of the rows in training, relative to the other weights.
      paths, sample, kind, field, bed, soft_mask: its documents.
      validation_names, test_names: its documents that are held out, where the split is by names.

    Raises:
      ValueError: an option is out of range.
    """

    name: str
    weight: float = 1.0
    paths: tuple[str, ...] = ()
    sample: str | None = None
    kind: Kind = "text"
    field: str = "text"
    bed: str | None = None
    soft_mask: Literal["keep", "upper"] = "keep"
    validation_names: tuple[str, ...] = ()
    test_names: tuple[str, ...] = ()

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "weight", above=0, why=": it is a share; leave a source out to read nothing of it")
        if not self.name or "/" in self.name:
            raise ValueError(f"SourceConfig.name must be a word without '/', got {self.name!r}")


@dataclass(frozen=True, eq=False)
class JoinedSource:
    """The documents of several sources, one source after the other.

    Attributes:
      sources: at least one.
      firsts: the number of each source's first document, and the number of documents.
    """

    sources: tuple[DocumentSource, ...]
    firsts: np.ndarray = field(init=False, repr=False)
    lengths: np.ndarray = field(init=False, repr=False)
    ends: np.ndarray = field(init=False, repr=False)

    __repr__ = show

    def __post_init__(self) -> None:
        counts = np.cumsum([0, *(len(source) for source in self.sources)])
        object.__setattr__(self, "firsts", counts)
        object.__setattr__(self, "lengths", np.concatenate([source.lengths for source in self.sources]))
        object.__setattr__(self, "ends", np.concatenate([document_ends(source) for source in self.sources]))

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def names(self) -> Sequence[str]:
        """The names of the documents, as their sources call them."""
        return [name for source in self.sources for name in source.names]

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        which = bisect_right(self.firsts, i) - 1
        return self.sources[which].read(i - int(self.firsts[which]), start, stop)


@dataclass(frozen=True, eq=False)
class JoinedRows:
    """The rows of several lists, one list after the other.

    Attributes:
      indexes: the lists, with rows of one length.
      documents: what is added to a list's numbers of documents.
    """

    indexes: tuple[RowIndex, ...]
    documents: tuple[int, ...]

    @property
    def row_length(self) -> int:
        return self.indexes[0].row_length

    def __len__(self) -> int:
        return sum(len(index) for index in self.indexes)

    def spans(self, row: int) -> list[Span]:
        which = 0
        while row >= len(self.indexes[which]):
            row, which = row - len(self.indexes[which]), which + 1
        shift = self.documents[which]
        return [span._replace(document=span.document + shift) for span in self.indexes[which].spans(row)]
