"""Parts of documents as documents of their own, without copying; splits return them."""

from dataclasses import dataclass, field

import numpy as np

from jaxblt.data.sources.base import DocumentSource, check_range, document_ends
from jaxblt.show import show


@dataclass(frozen=True, eq=False)
class Regions:
    """Document i is bytes [starts[i], stops[i]) of document `documents[i]`; no other byte is read.

    Attributes:
      source: the whole documents.
      documents: Int64[N], which document each region lies in.
      starts: Int64[N], first byte.
      stops: Int64[N], one past the last byte.
      lengths: Int64[N], bytes in each region.
      ends: Bool[N], whether the region reaches the end of a document that ends.
    """

    source: DocumentSource
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    lengths: np.ndarray = field(init=False, repr=False)
    ends: np.ndarray = field(init=False, repr=False)

    __repr__ = show

    def __post_init__(self) -> None:
        at_end = self.stops == self.source.lengths[self.documents]
        object.__setattr__(self, "lengths", self.stops - self.starts)
        object.__setattr__(self, "ends", document_ends(self.source)[self.documents] & at_end)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def names(self) -> list[str]:
        """The documents' names, followed by the bytes where a region is but a part."""
        full = self.source.lengths[self.documents]
        columns = (x.tolist() for x in (self.documents, self.starts, self.stops, full))
        source: list[str] = list(self.source.names)
        return [
            source[d] if (start, stop) == (0, length) else f"{source[d]}[{start}:{stop}]"
            for d, start, stop, length in zip(*columns, strict=True)
        ]

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        offset = int(self.starts[i])
        return self.source.read(int(self.documents[i]), offset + start, offset + stop)


def whole(source: DocumentSource, documents: np.ndarray | None = None) -> Regions:
    """Return whole documents of `source`, all of them or those numbered in `documents`."""
    chosen = np.arange(len(source)) if documents is None else np.asarray(documents, np.int64)
    return Regions(source, chosen, np.zeros(len(chosen), np.int64), source.lengths[chosen])
