"""The interface of sources of documents, and documents that are already in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from jaxblt.show import show
from jaxblt.validation import check_kind


@runtime_checkable
class DocumentSource(Protocol):
    """Documents of bytes that can be read chunk by chunk, in any order and from any thread or process.

    A source may also have an attribute `ends`, Bool[N]. It is True if the last byte of a document ends a text (an EOS
    may follow), and False if the text was cut there. Without it every document ends.
    """

    def __len__(self) -> int:
        """Return the number of documents N."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The name of each document, for errors and for splits that pick documents by name."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Int64[N], bytes in each document."""
        ...

    def read(self, i: int, start: int, stop: int) -> bytes:
        """Read bytes [start, stop) of document i, 0-based and half-open.

        Raises:
          IndexError: there is no such document, or the range leaves it.
        """
        ...


@dataclass(frozen=True, eq=False)
class BytesSource:
    """Documents held in memory.

    Attributes:
      documents: their bytes.
      names: what they are called; by default their numbers.
      lengths: Int64[N], bytes in each.

    Raises:
      TypeError: a document is text, or anything else than bytes.
      ValueError: another number of names than of documents.
    """

    documents: Sequence[bytes]
    names: Sequence[str] = ()
    lengths: np.ndarray = field(init=False, repr=False)

    __repr__ = show

    def __post_init__(self) -> None:
        for i, document in enumerate(self.documents):
            check_kind(
                f"document {i}",
                document,
                bytes,
                bytearray,
                memoryview,
                np.ndarray,
                fix="hand over a list of bytes",
            )
        names = self.names or [str(i) for i in range(len(self.documents))]
        if len(names) != len(self.documents):
            raise ValueError(f"{len(self.documents)} documents need as many names, got {len(names)}")
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "lengths", np.array([len(d) for d in self.documents], np.int64))

    def __len__(self) -> int:
        return len(self.documents)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        return self.documents[i][start:stop]


@dataclass(frozen=True, eq=False)
class SourceOver:
    """A source that reads the documents of another one in its own way, with their names, lengths and ends."""

    source: DocumentSource

    def __len__(self) -> int:
        return len(self.source)

    @property
    def names(self) -> Sequence[str]:
        return self.source.names

    @property
    def lengths(self) -> np.ndarray:
        return self.source.lengths

    @property
    def ends(self) -> np.ndarray:
        return document_ends(self.source)


def check_range(source: DocumentSource, i: int, start: int, stop: int) -> None:
    """Raise IndexError unless [start, stop) lies inside document i of `source`."""
    if not 0 <= i < len(source):
        raise IndexError(f"document {i} does not exist: the source has {len(source)} (0..{len(source) - 1})")
    length = int(source.lengths[i])
    if not 0 <= start <= stop <= length:
        raise IndexError(
            f"bytes [{start}, {stop}) leave document {source.names[i]!r}, which has [0, {length})"
        )


def document_ends(source: DocumentSource) -> np.ndarray:
    """Return Bool[N]: whether each document ends where its bytes end (see `DocumentSource`)."""
    ends = getattr(source, "ends", None)
    return np.ones(len(source), bool) if ends is None else np.asarray(ends, bool)


def read_document(source: DocumentSource, i: int) -> bytes:
    """Read all bytes of document i."""
    return source.read(i, 0, int(source.lengths[i]))
