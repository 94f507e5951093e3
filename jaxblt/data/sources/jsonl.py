"""A text field of JSON lines as documents."""

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxblt.data.sources.base import check_range
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import name_of, plain_start, read_all
from jaxblt.data.sources.unchanged import stamp_of, tell_change


class JsonlSource:
    """Each line is a JSON object whose `field` is one document, encoded as UTF-8. Blank lines are skipped.

    One pass at the start finds and checks the lines. A plain file is then read line by line where it lies; compressed
    files and UTF-16 are held in memory. Reading a chunk of a document decodes its whole line.

    Args:
      paths: files, globs and URLs.
      field: the key of the text.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ValueError: a file is empty or has no line; a line is not UTF-8, not a JSON object, or lacks the text.
    """

    def __init__(self, paths: str | os.PathLike | Iterable[str | os.PathLike], *, field: str = "text"):
        self._field = field
        self._paths = expand(paths)
        self._stamps = list(map(stamp_of, self._paths))
        self._held: dict[int, bytes] = {}
        self._lines: list[tuple[int, int, int]] = []  # file, offset, bytes of the line
        self.names: list[str] = []
        lengths: list[int] = []
        for file, path in enumerate(self._paths):
            lengths += self._scan(file, path)
        self.lengths = np.array(lengths, np.int64)

    def _scan(self, file: int, path: Path) -> list[int]:
        start = plain_start(path)
        if start is None:
            self._held[file] = read_all(path)
        lengths, offset = [], start or 0
        for number, line in enumerate(self._lines_of(file, path, offset), start=1):
            if line.strip():
                name = f"{name_of(path)}:{number}"
                lengths.append(len(field_bytes(line, self._field, name)))
                self._lines.append((file, offset, len(line)))
                self.names.append(name)
            offset += len(line)
        if not lengths:
            raise ValueError(f"{name_of(path)!r} holds blank lines alone: no JSON object")
        return lengths

    def _lines_of(self, file: int, path: Path, start: int) -> Iterable[bytes]:
        # Avoid splitlines, which cuts at \r too
        with io.BytesIO(self._held[file]) if file in self._held else open(path, "rb") as lines:
            lines.seek(start)
            yield from lines

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        file, offset, size = self._lines[i]
        if file in self._held:
            line = self._held[file][offset : offset + size]
        else:
            with open(self._paths[file], "rb") as handle:
                tell_change(handle, self._paths[file], self._stamps[file])
                handle.seek(offset)
                line = handle.read(size)
        return field_bytes(line, self._field, self.names[i])[start:stop]


def field_bytes(line: bytes, field: str, name: str) -> bytes:
    """Return the text of one JSON line as UTF-8.

    Raises:
      ValueError: names the line and what is wrong with it.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        byte = line[error.start]
        raise ValueError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at column {error.start}; re-encode it"
        ) from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and deep nesting
        raise ValueError(f"{name} is not JSON: {error}; expected one object a line") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{name} holds a {type(record).__name__}; expected an object with the field {field!r}"
        )
    if field not in record:
        raise ValueError(f"{name} has no field {field!r}; its fields are {sorted(record)}")
    if not isinstance(record[field], str):
        raise ValueError(f"{name}: field {field!r} holds a {type(record[field]).__name__}; expected a string")
    try:
        return record[field].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: field {field!r} holds a lone surrogate, which has no UTF-8 form"
        ) from error
