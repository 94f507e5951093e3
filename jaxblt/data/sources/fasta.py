"""FASTA records as documents. Coordinates are 0-based and half-open; bases are bytes like any other."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jaxblt.data.sources.base import DocumentSource, check_range
from jaxblt.data.sources.fasta_index import FastaLayout, index_fasta, read_bases
from jaxblt.data.sources.fasta_text import parse_fasta
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import name_of, plain_start, read_all
from jaxblt.data.sources.unchanged import Stamp, stamp_of


class FastaSource:
    """Each record is one document, named by the first word of its header; N, IUPAC codes and case are kept.

    Plain files are read where they lie, at random, through a `.fai` index, which is built beside the file when it is
    missing. Compressed files and UTF-16 are held in memory, and so are records whose lines differ in length.

    Args:
      paths: files, globs and URLs.
      soft_mask: "keep" leaves lower-case (soft-masked) bases as they are, "upper" raises them.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ValueError: a file is empty, damaged or has no record; a name occurs twice.
    """

    def __init__(
        self,
        paths: str | os.PathLike | Iterable[str | os.PathLike],
        *,
        soft_mask: Literal["keep", "upper"] = "keep",
    ):
        if soft_mask not in ("keep", "upper"):
            raise ValueError(f"soft_mask must be 'keep' or 'upper', got {soft_mask!r}")
        self._upper = soft_mask == "upper"
        self._records: list[_Record] = [r for path in expand(paths) for r in _records(path)]
        self.names = [r.name for r in self._records]
        self.lengths = np.array([r.length for r in self._records], np.int64)
        _check_unique(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        record = self._records[i]
        if isinstance(record.bases, bytes):
            bases = record.bases[start:stop]
        else:
            bases = read_bases(record.path, record.bases, start, stop, record.stamp)
        return bases.upper() if self._upper else bases


class _Record(NamedTuple):
    path: Path
    name: str
    bases: bytes | FastaLayout
    stamp: Stamp

    @property
    def length(self) -> int:
        return len(self.bases) if isinstance(self.bases, bytes) else self.bases.length


def _records(path: Path) -> list[_Record]:
    start, stamp = plain_start(path), stamp_of(path)
    found = parse_fasta(read_all(path), name_of(path)) if start is None else index_fasta(path, start)
    return [_Record(path, name, bases, stamp) for name, bases in found]


def _check_unique(records: list[_Record]) -> None:
    seen: dict[str, Path] = {}
    for record in records:
        if record.name in seen:
            first, second = name_of(seen[record.name]), name_of(record.path)
            where = f"in '{first}'" if first == second else f"in '{first}' and '{second}'"
            fix = "rename one" if first == second else "rename one, or leave one file out of the paths"
            raise ValueError(f"FASTA record {record.name!r} occurs twice, {where}: {fix}")
        seen[record.name] = record.path


def fetch(source: DocumentSource, name: str, start: int, stop: int, *, pad: bool = True) -> bytes:
    """Read bases [start, stop) of the record `name`; what lies outside the record is N.

    Args:
      source: FASTA records, or any source.
      name: the record.
      start: first base, 0-based; may be negative with `pad`.
      stop: one past the last base; may pass the record's end with `pad`.
      pad: fill with N out of bounds; without it that is an error.

    Raises:
      KeyError: there is no such record.
      ValueError: the interval is reversed, or out of bounds without `pad`.
    """
    names = list(source.names)
    if name not in names:
        raise KeyError(f"no record {name!r}; the source has {', '.join(names[:8])}")
    return read_padded(source, names.index(name), start, stop, pad=pad)


def read_padded(source: DocumentSource, i: int, start: int, stop: int, *, pad: bool = True) -> bytes:
    """Read as `fetch` does, by the document's number."""
    length = int(source.lengths[i])
    if stop < start:
        raise ValueError(f"interval {source.names[i]}:{start}-{stop} ends before it starts")
    if not pad and not 0 <= start <= stop <= length:
        raise ValueError(
            f"interval {source.names[i]}:{start}-{stop} leaves the record [0, {length}): clip it, or pad "
            "with N (pad=True in Python)"
        )
    inner_start, inner_stop = min(max(start, 0), length), min(max(stop, 0), length)
    before = min(stop, 0) - min(start, 0)
    after = max(stop, length) - max(start, length)
    return b"N" * before + source.read(i, inner_start, inner_stop) + b"N" * after
