"""Files as documents, byte for byte."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxblt.data.sources.base import check_range
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.opening import empty, name_of, plain_start, read_all
from jaxblt.data.sources.unchanged import stamp_of, tell_change


class TextSource:
    """Each file is one document of UTF-8 text; its characters and line ends are not changed.

    Plain files are read where they lie, chunk by chunk. Compressed files are held in memory, decompressed, and files in
    UTF-16 as UTF-8. A byte-order mark is left out.

    Args:
      paths: files, globs and URLs.
      raw: read every file as it lies, byte for byte: what is compressed stays so, and binary formats are not refused.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ValueError: a file is empty, damaged, or of a binary format.
    """

    def __init__(self, paths: str | os.PathLike | Iterable[str | os.PathLike], *, raw: bool = False):
        self._paths = expand(paths)
        self._starts = [0 if raw else plain_start(path) for path in self._paths]
        self._held = {i: read_all(self._paths[i]) for i, start in enumerate(self._starts) if start is None}
        self._stamps = {
            i: stamp_of(self._paths[i]) for i, start in enumerate(self._starts) if start is not None
        }
        self.names = [name_of(path) for path in self._paths]
        self.lengths = np.array([self._size(i, path) for i, path in enumerate(self._paths)], np.int64)

    def _size(self, i: int, path: Path) -> int:
        start = self._starts[i]
        size = len(self._held[i]) if start is None else self._stamps[i][-1] - start
        if not size:
            raise empty(path)
        return size

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        before = self._starts[i]
        if before is None:
            return self._held[i][start:stop]
        with open(self._paths[i], "rb", buffering=0) as file:
            tell_change(file, self._paths[i], self._stamps[i])
            return _read_exactly(file, before + start, stop - start, self.names[i])


def _read_exactly(file, start: int, count: int, name: str) -> bytes:
    file.seek(start)
    parts = []
    while count:
        part = file.read(count)  # unbuffered: one call returns at most about 2 GiB
        if not part:
            raise OSError(f"{name!r} became shorter while it was in use: do not change data during a run")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
