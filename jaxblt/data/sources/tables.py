"""Rows of tables: cells with commas or tabs between them, of any length."""

import csv
import io
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxblt.data.sources.opening import read_all
from jaxblt.validation import MOST

TABLES = {".csv": ",", ".tsv": "\t"}
"""Names of tables end so; what stands between two of their cells."""

_LIMIT = threading.Lock()


def read_table(path: Path, comma: str) -> Iterator[tuple[int, list[str]]]:
    """Read line number and cells of each row that is not blank; there is at least one.

    Args:
      path: of the table.
      comma: what stands between two cells.

    Raises:
      ValueError: the file is empty, not UTF-8, or a quote is not closed where its cell ends.
    """
    try:
        text = read_all(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 (byte {error.start}): re-encode it") from error
    if not text.strip():
        raise ValueError(f"'{path}' holds blank lines alone: expected rows of a table")
    # Be strict: what stands behind a closing quote would become part of the cell, and the quotes would be lost.
    reader, before = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True), 0
    try:
        while (cells := _next_row(reader)) is not None:
            if comma == "\t" and reader.line_num > before + 1:
                raise csv.Error(f"a cell that begins with a quote ends in line {reader.line_num}")
            before = reader.line_num
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise ValueError(
            f"{path}:{before + 1} is no row of a table: {error}; write a quote that belongs to the text twice, and "
            "quotes around the cell"
        ) from error


def _next_row(reader: Iterator[list[str]]) -> list[str] | None:
    """Return the next row, or None.

    Lift Python's limit on cells meanwhile; other readers keep it.
    """
    with _LIMIT:
        before = csv.field_size_limit(MOST)
        try:
            return next(reader, None)
        finally:
            csv.field_size_limit(before)
