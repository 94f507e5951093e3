"""Windows with stride over every document; nothing is stored but one number a document."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jaxblt.data.rows import Span
from jaxblt.show import show


@dataclass(frozen=True, eq=False)
class WindowIndex:
    """Row k of a document is its pairs [k·stride, k·stride + row_length); no window crosses documents.

    Attributes:
      pairs: Int64[N], pairs in each document (see `rows.pair_counts`).
      row_length: pairs in a window (T).
      stride: pairs from one window to the next, 1..T.
      partial: "keep" a document's last window when it is not full (nothing is lost), or "drop" it.
      score: "all" targets of a window, or only the "new" ones, which no window before it held. With "keep", each target
        is then scored exactly once, after T - stride pairs of context wherever there are as many.

    Raises:
      ValueError: a stride outside 1..T.
    """

    pairs: np.ndarray
    row_length: int
    stride: int
    partial: Literal["keep", "drop"] = "keep"
    score: Literal["all", "new"] = "all"
    _ends: np.ndarray = field(init=False, repr=False)  # rows up to and with each document

    __repr__ = show

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.row_length:
            raise ValueError(
                f"stride must lie in 1..seq_len = 1..{self.row_length} to skip no byte, got {self.stride}: "
                "set data.stride to None for seq_len, or to fewer bytes"
            )
        full = np.maximum(self.pairs - self.row_length + self.stride, 0) // self.stride
        reached = np.where(full > 0, (full - 1) * self.stride + self.row_length, 0)
        windows = full + (reached < self.pairs) if self.partial == "keep" else full
        object.__setattr__(self, "_ends", np.cumsum(windows))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def spans(self, row: int) -> list[Span]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} does not exist: the index has {len(self)}")
        document = int(np.searchsorted(self._ends, row, side="right"))
        before = int(self._ends[document - 1]) if document else 0
        start = (row - before) * self.stride
        stop = min(start + self.row_length, int(self.pairs[document]))
        seen = start + self.row_length - self.stride if self.score == "new" and row > before else start
        return [Span(document, start, stop, 0, seen)]
