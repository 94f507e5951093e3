"""Random access to plain FASTA files through `.fai` indexes, in the format of samtools."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxblt.data.sources.fasta_text import BLANKS, no_record, record_name, records_of
from jaxblt.data.sources.formats import mark_of
from jaxblt.data.sources.opening import name_of
from jaxblt.data.sources.unchanged import Stamp, tell_change
from jaxblt.outputs import write_text

HEADER = 4096
"""Bytes before a record's bases that are looked at."""
LINES = 4096
"""Lines of a long record that are counted at once."""


class FastaLayout(NamedTuple):
    """The place of one record's bases (a line of a `.fai` file).

    Attributes:
      length: bases in the record.
      offset: byte of the file at which the first base lies.
      line_bases: bases in each line but the last.
      line_bytes: bytes in each line, line end included.
    """

    length: int
    offset: int
    line_bases: int
    line_bytes: int


Entry = tuple[str, FastaLayout | bytes]
"""A record's name, and where its bases lie; the bases themselves where no layout describes them."""


def index_fasta(path: Path, start: int = 0) -> list[Entry]:
    """Return every record of a plain file, in the file's order.

    Uses `<path>.fai` when it is there and not older than the file. Otherwise the file is read once, line by line, and
    an index is written beside it if that folder can be written. Records whose lines differ in length, or hold blanks or
    carriage returns, have no layout: their bases are returned, and no index is written.

    Args:
      path: of the file.
      start: byte at which its text begins.

    Raises:
      ValueError: no record, a header without a name, text before the first header, or an index of another file.
    """
    index = Path(f"{path}.fai")
    if index.exists() and index.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return _read_index(path, index)
    entries = list(_scan(path, start))
    if not entries:
        raise no_record(name_of(path))
    layouts = {name: layout for name, layout in entries if isinstance(layout, FastaLayout)}
    if len(layouts) == len(entries) and os.access(path.parent, os.W_OK):
        _write_index(index, layouts)
    return entries


class _Record:
    """The layout of a record, learned from its lines one after the other."""

    def __init__(self, header: bytes, offset: int):
        self.header, self.start, self.offset = header, offset - len(header), offset
        self.length = self.line_bases = self.line_bytes = 0
        self.is_regular = b"\r" not in header.rstrip()
        self._end, self._ended, self._next = b"", False, 0

    def add(self, line: bytes) -> None:
        """Count a line: all are as long as the first one, except the last."""
        bases = len(line.rstrip())
        if bases and (self._ended or len(line.translate(None, BLANKS)) != bases):
            self.is_regular = False
        elif bases and not self.length:
            self.line_bases, self.line_bytes, self._end = bases, len(line), line[bases:]
            self._next = LINES * bases
        elif bases > self.line_bases:
            self.is_regular = False
        elif bases < self.line_bases or len(line) != self.line_bytes:
            self._ended = True
        self.length += bases

    def add_many(self, file: io.BufferedReader) -> int:
        """Count `LINES` lines of a record that had as many, if all are full.

        Returns their bytes, or 0.
        """
        if self._ended or not self.is_regular or self.length < self._next:
            return 0
        held, bases = file.read(LINES * self.line_bytes), LINES * self.line_bases
        if len(held) == LINES * self.line_bytes and self._are_full(held):
            self.length, self._next = self.length + bases, self._next + bases
            return len(held)
        file.seek(-len(held), os.SEEK_CUR)
        self._next += bases  # the rest of the record is mostly shorter than that
        return 0

    def _are_full(self, held: bytes) -> bool:
        lines = np.frombuffer(held, np.uint8).reshape(LINES, self.line_bytes)
        ends = lines[:, self.line_bases :] == np.frombuffer(self._end, np.uint8)
        starts = lines[:, 0] != ord(">")
        return (
            bool(ends.all() and starts.all()) and len(held.translate(None, BLANKS)) == LINES * self.line_bases
        )

    def entries(self, path: Path, end: int) -> list[Entry]:
        """Return the record; several where a carriage return was the line end before a header."""
        if self.is_regular:
            layout = FastaLayout(self.length, self.offset, self.line_bases, self.line_bytes)
            return [(record_name(self.header[1:], name_of(path)), layout)]
        with open(path, "rb") as file:
            file.seek(self.start)
            return [*records_of(file.read(end - self.start), name_of(path))]


def _scan(path: Path, start: int) -> Iterator[Entry]:
    """Return the records of a file that is read line by line."""
    place, record = start, None
    with open(path, "rb") as file:
        file.seek(start)
        while line := file.readline():
            place += len(line)
            if line.startswith(b">") or (record is None and b"\r>" in line):
                if record is not None:
                    yield from record.entries(path, place - len(line))
                record = _Record(line, place)
            elif record is None:
                yield from records_of(line, name_of(path))
            else:
                record.add(line)
                place += record.add_many(file)
    if record is not None:
        yield from record.entries(path, place)


def _write_index(index: Path, layouts: dict[str, FastaLayout]) -> None:
    """Write an index whole or not at all, though other processes index the same file."""
    rows = ("\t".join((name, *map(str, layout))) + "\n" for name, layout in layouts.items())
    write_text(index, "".join(rows))


def _read_index(path: Path, index: Path) -> list[Entry]:
    try:
        rows = [line.split("\t") for line in index.read_text(encoding="utf-8").split("\n") if line]
        layouts = [(name, FastaLayout(*map(int, numbers))) for name, *numbers in rows]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{str(index)!r} is no index of FASTA ({error}): delete it") from error
    _check_layouts(layouts, path, index)
    return [*layouts]


def _check_layouts(layouts: list[tuple[str, FastaLayout]], path: Path, index: Path) -> None:
    if not layouts:
        raise ValueError(f"{str(index)!r} has no record of {str(path)!r}: delete the index")
    size = path.stat().st_size
    for name, layout in layouts:
        if not _lies_within(layout, size):
            raise ValueError(
                f"{str(index)!r} says of record {name!r} {tuple(layout)}, which leaves the {size} bytes of "
                f"{str(path)!r}: delete the index"
            )
    for name, layout in (layouts[0], layouts[-1]):
        if not _follows_header(path, name, layout.offset):
            raise ValueError(
                f"{str(index)!r} is of another file than {str(path)!r}: at byte {layout.offset} no record "
                f"{name!r} begins; delete the index"
            )


def _follows_header(path: Path, name: str, offset: int) -> bool:
    """Return whether a record's header ends at a byte.

    Another file may have taken the place of the indexed one.
    """
    start = max(offset - HEADER, 0)
    with open(path, "rb") as file:
        file.seek(start)
        before = file.read(offset - start)
    if not start:
        before = before.removeprefix(mark_of(before)[0])
    lines = before.split(b"\n")
    if len(lines) == 2 and start:
        return lines[1] == b""  # the header is longer than what was read
    header = lines[-2].rstrip() if len(lines) > 1 and lines[-1] == b"" else b""
    words = header[1:].decode("utf-8", "replace").split()
    return header[:1] == b">" and words[:1] == [name] and b"\r" not in header


def _lies_within(layout: FastaLayout, size: int) -> bool:
    """Return whether the bases of a record lie in a file of `size` bytes."""
    if layout.length < 0 or layout.offset < 0:
        return False
    lines = 0 < layout.line_bases <= layout.line_bytes
    return not layout.length or (lines and _byte_of(layout, layout.length - 1) < size)


def read_bases(path: Path, layout: FastaLayout, start: int, stop: int, stamp: Stamp) -> bytes:
    """Return bases [start, stop) of a record, line ends removed.

    Args:
      path: the FASTA file.
      layout: where the record lies in it.
      start, stop: bases of the record.
      stamp: `stamp_of` the file when it was indexed.

    Warns:
      ChangedFileWarning: the file was written or replaced since.

    Raises:
      OSError: the file has changed since it was indexed, or its index is wrong.
    """
    if start == stop:
        return b""
    first, last = (_byte_of(layout, base) for base in (start, stop - 1))
    with open(path, "rb") as file:
        tell_change(file, path, stamp)
        file.seek(first)
        held = file.read(last + 1 - first)
        behind = file.read(1) if stop == layout.length else b""
    bases = held.translate(None, BLANKS)
    if len(bases) != stop - start or behind.strip():
        raise OSError(
            f"{str(path)!r} and its index differ: delete {str(path) + '.fai'!r}, and do not change data"
        )
    return bases


def _byte_of(layout: FastaLayout, base: int) -> int:
    line, column = divmod(base, layout.line_bases)
    return layout.offset + line * layout.line_bytes + column
