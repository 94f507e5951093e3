"""The bytes before a row that begins inside a document, for models that read them."""

from dataclasses import dataclass

import numpy as np

from jaxblt.data.rows import Span, stream_ids
from jaxblt.data.sources import DocumentSource, Regions, ReverseComplement


@dataclass(frozen=True)
class History:
    """The number of ids of its document that come with a row, and where in the document they begin.

    Attributes:
      length: the most ids; the last of them is the row's first input.
      grid: ids begin at a multiple of it, counted from the whole document's start. Then `length` is 2 * grid, and there
        are more than `grid` ids if the document has as many. With 1 they are the last `length` ids.

    Raises:
      ValueError: the length does not suit the grid.
    """

    length: int
    grid: int = 1

    def __post_init__(self) -> None:
        if self.length < 1 or (self.grid != 1 and self.length != 2 * self.grid):
            raise ValueError(
                f"a history is of at least 1 id, and of 2 * grid with a grid, got {self.length}, {self.grid}"
            )

    def begin(self, position: int) -> int:
        """Return the first id of the history of a row that begins at input `position`."""
        if self.grid == 1:
            return max(position + 1 - self.length, 0)
        return max(position // self.grid - 1, 0) * self.grid

    def ids(self, part: Regions, span: Span, *, flip: bool) -> np.ndarray:
        """Return ids of the document up to the first input of a span.

        With `flip` they are of the other strand.
        """
        document, source = int(part.documents[span.document]), part.source
        position = int(part.starts[span.document]) + span.start
        if flip:
            length: int = int(source.lengths[document])
            position = length - int(part.starts[span.document]) - span.stop
            source: DocumentSource = ReverseComplement(source)
        return stream_ids(source, document, self.begin(position), position)
