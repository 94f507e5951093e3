"""Random access to plain FASTA files through the `.fai` index of pyfaidx."""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HEADER = 4096
"""Bytes before a record's bases that are looked at."""


class FastaLayout(NamedTuple):
    """Where one record's bases lie (a line of a `.fai` file).

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


def index_fasta(path: Path) -> dict[str, FastaLayout]:
    """The layout of every record, by name, in the file's order.

    Uses `<path>.fai` when it is there and not older than the file; otherwise builds it, beside the file if
    that folder can be written and in a temporary folder for this process if not.

    Raises:
      ImportError: pyfaidx is not installed.
      ValueError: no record, lines of unequal length, a name that occurs twice, or an index of another file.
    """
    faidx = _import_pyfaidx(path)
    index = Path(f"{path}.fai")
    if index.exists() and index.stat().st_mtime_ns >= path.stat().st_mtime_ns:
        return _read(faidx, path, index)
    folder = path.parent if os.access(path.parent, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fai-") as private:
        built = Path(private) / index.name
        layouts = _read(faidx, path, built)
        if folder is not None:
            os.replace(built, index)  # whole or not at all, though other processes index the same file
    return layouts


def _import_pyfaidx(path: Path) -> Any:
    try:
        import pyfaidx
    except ImportError as error:
        raise ImportError(
            f"reading the plain FASTA file {str(path)!r} needs pyfaidx: pip install 'jaxblt[genomics]', "
            "or compress the file (.gz, .xz), which is then held in memory"
        ) from error
    return pyfaidx


def _read(pyfaidx: Any, path: Path, index: Path) -> dict[str, FastaLayout]:
    try:
        opened = pyfaidx.Faidx(str(path), indexname=str(index))
    except (pyfaidx.FastaIndexingError, ValueError, RuntimeError, LookupError) as error:
        reason = " ".join(
            str(error).split()
        )  # pyfaidx raises RuntimeError for layouts that it did not expect
        raise ValueError(
            f"{str(path)!r} cannot be indexed as FASTA ({reason}): it needs '>' records with unique names and "
            "lines of one length; compressed (.gz, .xz) it is held in memory and lines may differ"
        ) from error
    opened.close()
    layouts = {name: FastaLayout(e.rlen, e.offset, e.lenc, e.lenb) for name, e in opened.index.items()}
    _check_layouts(layouts, path, index)
    return layouts


def _check_layouts(layouts: dict[str, FastaLayout], path: Path, index: Path) -> None:
    if not layouts:
        raise ValueError(f"{str(index)!r} has no record of {str(path)!r}: delete the index")
    size = path.stat().st_size
    for name, layout in layouts.items():
        if not _lies_within(layout, size):
            raise ValueError(
                f"{str(index)!r} says of record {name!r} {tuple(layout)}, which leaves the {size} bytes of "
                f"{str(path)!r}: delete the index"
            )
    for name in {next(iter(layouts)), list(layouts)[-1]}:
        if layouts[name].length and not _follows_header(path, name, layouts[name].offset):
            raise ValueError(
                f"{str(index)!r} is of another file than {str(path)!r}: at byte {layouts[name].offset} no record "
                f"{name!r} begins; delete the index"
            )


def _follows_header(path: Path, name: str, offset: int) -> bool:
    """Whether a record's header ends at a byte: a file may be older than the index of the one whose place it took."""
    start = max(offset - HEADER, 0)
    with open(path, "rb") as file:
        file.seek(start)
        before = file.read(offset - start)
    lines = before.split(b"\n")
    if len(lines) == 2 and start:
        return lines[1] == b""  # the header is longer than what was read
    header = lines[-2] if len(lines) > 1 and lines[-1] == b"" else b""
    words = header[1:].decode("utf-8", "replace").split()  # as pyfaidx does: at spaces of other scripts too
    return header[:1] == b">" and words[:1] == [name]


def _lies_within(layout: FastaLayout, size: int) -> bool:
    """Whether the bases of a record lie in a file of `size` bytes."""
    if layout.length < 0 or layout.offset < 0:
        return False
    lines = 0 < layout.line_bases <= layout.line_bytes
    return not layout.length or (lines and _byte_of(layout, layout.length - 1) < size)


def read_bases(path: Path, layout: FastaLayout, start: int, stop: int) -> bytes:
    """Bases [start, stop) of a record, line ends removed.

    Raises:
      OSError: the file has changed since it was indexed.
      ValueError: blanks among the bases, which the index counts as bases.
    """
    if start == stop:
        return b""
    first, last = (_byte_of(layout, base) for base in (start, stop - 1))
    with open(path, "rb") as file:
        file.seek(first)
        bases = file.read(last + 1 - first).translate(None, b"\r\n")
    if len(bases) != stop - start:
        raise OSError(
            f"{str(path)!r} and its index differ: delete {str(path) + '.fai'!r}, and do not change data"
        )
    if b" " in bases or b"\t" in bases:
        raise ValueError(
            f"{str(path)!r} has blanks among the bases: remove them, or compress the file (.gz, .xz)"
        )
    return bases


def _byte_of(layout: FastaLayout, base: int) -> int:
    line, column = divmod(base, layout.line_bases)
    return layout.offset + line * layout.line_bytes + column
