"""Files that are read where they lie, and must not change while they are in use."""

import os
import warnings
from pathlib import Path
from typing import IO

from jaxblt.data.sources.opening import name_of

Stamp = tuple[int, int, int]
"""Inode, nanoseconds of the last change, and bytes of a file."""


class ChangedFileWarning(UserWarning):
    """A file was written or replaced while it was in use: rows that are read now hold other bytes."""


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file, which changes when the file is written or replaced."""
    return _stamp(os.stat(path))


def tell_change(file: IO[bytes], path: Path, stamp: Stamp) -> None:
    """Warn if an open file is not the one that had this stamp.

    Warns:
      ChangedFileWarning: the file was written or replaced since.
    """
    if _stamp(os.fstat(file.fileno())) != stamp:
        warnings.warn(
            f"{name_of(path)!r} was changed while it was in use: do not change data during a run",
            ChangedFileWarning,
            stacklevel=3,
        )


def _stamp(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_mtime_ns, found.st_size
