"""The letters of a run's data: their case, and those that are scored. Answers read other records alike."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxblt.data.sources.base import DocumentSource, SourceOver
from jaxblt.data.vocab import OFFSET, VOCAB_SIZE


@dataclass(frozen=True)
class Letters:
    """The changes to the bytes of records; the defaults take them as they are.

    Attributes:
      upper: lower-case letters are raised, as `soft_mask="upper"` does.
      scored: characters whose targets count; None for all targets.
    """

    upper: bool = False
    scored: str | None = None

    def read(self, data: bytes) -> bytes:
        """Return bytes in the case of the run's data."""
        return data.upper() if self.upper else data

    def open(self, source: DocumentSource) -> DocumentSource:
        """Return documents in the case of the run's data."""
        return Raised(source) if self.upper else source

    @property
    def ids(self) -> np.ndarray:
        """Int32[256], the id of each byte as it is read."""
        data = np.frombuffer(self.read(bytes(range(256))), np.uint8)
        return data.astype(np.int32) + OFFSET

    @property
    def counted(self) -> np.ndarray:
        """Int32[260], 1 for the ids that count as targets."""
        if self.scored is None:
            return np.ones(VOCAB_SIZE, np.int32)
        table = np.zeros(VOCAB_SIZE, np.int32)
        table[np.frombuffer(self.scored.encode("utf-8"), np.uint8).astype(np.int32) + OFFSET] = 1
        return table


def letters_of(data: Any, *, of_fasta: bool = False) -> Letters:
    """Return how a run reads records: as its data.

    Lower case is raised if all of several sources raise it; for records of FASTA, if all of them that are FASTA do.

    Args:
      data: of the run's recipe.
      of_fasta: the records are those of a FASTA file.
    """
    parts = [data.of(source) for source in getattr(data, "sources", ())] or [data]
    if of_fasta:
        parts = [part for part in parts if getattr(part, "sample_or_kind", None) == "fasta"] or parts
    upper = all(getattr(part, "soft_mask", None) == "upper" for part in parts)
    return Letters(upper, getattr(data, "scored", None))


class Raised(SourceOver):
    """Every document with its lower-case letters raised, read lazily."""

    def read(self, i: int, start: int, stop: int) -> bytes:
        return self.source.read(i, start, stop).upper()
