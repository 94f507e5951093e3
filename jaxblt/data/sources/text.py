"""Files as documents, byte for byte."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxblt.data.sources.base import check_range
from jaxblt.data.sources.files import COMPRESSED, empty, expand, name_of, read_all, warn_compressed


class TextSource:
    """Each file is one document; its bytes are neither decoded nor normalised.

    Plain files are read where they lie, chunk by chunk; `.gz` and `.xz` files are held in memory.

    Args:
      paths: files, globs and URLs.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ValueError: a file is empty or damaged.

    Warns:
      CompressedBytesWarning: a plain file begins as compressed ones do.
    """

    def __init__(self, paths: str | os.PathLike | Iterable[str | os.PathLike]):
        self._paths = expand(paths)
        self._held = {i: read_all(p) for i, p in enumerate(self._paths) if p.suffix in COMPRESSED}
        self.names = [name_of(path) for path in self._paths]
        self.lengths = np.array([self._size(i, path) for i, path in enumerate(self._paths)], np.int64)

    def _size(self, i: int, path: Path) -> int:
        size = len(self._held[i]) if i in self._held else path.stat().st_size
        if not size:
            raise empty(path)
        if i not in self._held:
            warn_compressed(path)
        return size

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        if i in self._held:
            return self._held[i][start:stop]
        with open(self._paths[i], "rb", buffering=0) as file:
            return _read_exactly(file, start, stop - start, self.names[i])


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
