"""BED intervals: parts of a genome as documents of their own."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxblt.data.sources.base import DocumentSource, check_range
from jaxblt.data.sources.fasta import read_padded
from jaxblt.data.sources.files import expand, expand_one
from jaxblt.data.sources.opening import name_of, read_lines
from jaxblt.data.sources.reverse import reverse_complement
from jaxblt.show import show


@dataclass(frozen=True)
class BedInterval:
    """Bases [start, stop) of a record, 0-based and half-open; strand "-" reads the other strand."""

    record: str
    start: int
    stop: int
    name: str = ""
    strand: str = "."


def read_bed(path: str | os.PathLike) -> list[BedInterval]:
    """Read the intervals of a BED file, plain or compressed, from its first 3 to 6 columns.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty or has no interval; a line lacks a column or holds no numbers or no base.
    """
    return [interval for _, interval in bed_lines(path)]


def bed_lines(path: str | os.PathLike) -> list[tuple[int, BedInterval]]:
    """Return what `read_bed` does, each interval with the number of its line."""
    file = expand_one(path)
    lines = enumerate(read_lines(file), start=1)
    intervals = [(n, _parse(line, f"{name_of(file)}:{n}")) for n, line in lines if _holds_data(line)]
    if not intervals:
        raise ValueError(f"{str(path)!r} has no BED interval: expected lines of record, start, stop")
    return intervals


def _holds_data(line: str) -> bool:
    words = line.split()
    return bool(words) and not line.startswith("#") and words[0] not in ("track", "browser")


def _parse(line: str, where: str) -> BedInterval:
    columns = line.rstrip().split("\t" if "\t" in line else None)
    try:
        record, start, stop = columns[0], int(columns[1]), int(columns[2])
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"{where} is no BED line: {line!r:.80}; expected record, start, stop with whole numbers"
        ) from error
    if stop <= start:
        raise ValueError(
            f"{where}: interval {record}:{start}-{stop} holds no base; BED is 0-based and half-open"
        )
    name, strand = (columns[3:4] or [""])[0], (columns[5:6] or ["."])[0]
    if strand not in ("+", "-", "."):
        raise ValueError(f"{where}: strand {strand!r} is none of '+', '-', '.'")
    return BedInterval(record, start, stop, name, strand)


@dataclass(frozen=True, eq=False)
class BedSource:
    """Intervals of a genome, each a document named `record:start-stop`, then its BED name if any.

    Attributes:
      genome: FASTA records.
      intervals: from `read_bed`.
      pad: out of bounds is N; without it such an interval is an error.
      lengths: Int64[N], bases in each interval.
      records: Int64[N], the genome's record that each interval lies in.

    Raises:
      ValueError: an interval names no record, or leaves its record without `pad`.
    """

    genome: DocumentSource
    intervals: list[BedInterval]
    pad: bool = True
    lengths: np.ndarray = field(init=False, repr=False)
    records: np.ndarray = field(init=False, repr=False)

    __repr__ = show

    def __post_init__(self) -> None:
        numbers = self._check()
        lengths = [x.stop - x.start for x in self.intervals]
        object.__setattr__(self, "lengths", np.array(lengths, np.int64))
        records = [numbers[x.record] for x in self.intervals]
        object.__setattr__(self, "records", np.array(records, np.int64))

    def _check(self) -> dict[str, int]:
        """Check that every interval fits, and return the number of every record."""
        numbers = {name: i for i, name in enumerate(self.genome.names)}
        for x in self.intervals:
            if x.record not in numbers:
                known = ", ".join(list(numbers)[:8])
                raise ValueError(
                    f"BED interval {self._label(x)!r}: no such record in the FASTA, which has {known}"
                )
            length = int(self.genome.lengths[numbers[x.record]])
            if not self.pad and not 0 <= x.start < x.stop <= length:
                raise ValueError(
                    f"BED interval {self._label(x)!r} leaves the record [0, {length}): clip it, or pad with "
                    "N (pad=True in Python)"
                )
        return numbers

    @staticmethod
    def _label(x: BedInterval) -> str:
        return f"{x.record}:{x.start}-{x.stop}" + (f" {x.name}" if x.name else "")

    def __len__(self) -> int:
        return len(self.intervals)

    @property
    def names(self) -> list[str]:
        return [self._label(x) for x in self.intervals]

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        x = self.intervals[i]
        if x.strand == "-":
            start, stop = x.stop - stop, x.stop - start
            return reverse_complement(read_padded(self.genome, int(self.records[i]), start, stop))
        return read_padded(self.genome, int(self.records[i]), x.start + start, x.start + stop)


def open_bed(
    genome: DocumentSource, paths: str | os.PathLike | Iterable[str | os.PathLike], *, pad: bool = True
) -> BedSource:
    """Open the intervals of one or more BED files over `genome`, in the files' order.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ValueError: as of `read_bed` and `BedSource`; names the files.
    """
    files: list[Path] = expand(paths)
    intervals = [x for file in files for x in read_bed(file)]
    try:
        return BedSource(genome, intervals, pad)
    except ValueError as error:
        raise ValueError(f"{', '.join(map(name_of, files))}: {error}") from error
