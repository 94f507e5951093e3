"""Pipes in place of files, as `<(zcat x.fa.gz)` makes them: copied once, because sources read at random places."""

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from functools import cache
from pathlib import Path

from jaxblt.data.sources.opening import open_text

MOST_SPOOLED = 1 << 34
"""Bytes that are taken from a pipe; never more than half of what is free where temporary files lie."""

_CHUNK = 1 << 20
_ENDINGS = {b">": ".fa", b"{": ".jsonl"}
"""A pipe has no name that tells its kind, so that the first byte of its text does."""


class PipeCopy(Path):
    """The path of a temporary copy, which is called by the pipe that it was taken from."""

    url: str = ""


def is_pipe(path: str) -> bool:
    """Return whether a path names a pipe or a device.

    Its bytes can be read once and in order.
    """
    mode = os.stat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def spooled(path: str) -> PipeCopy:
    """Return a temporary copy of what a pipe holds, which is removed when the process ends.

    A pipe can be read once, so that one that is named again in this process is the same copy.

    Raises:
      OSError: it holds too much.
    """
    found = os.stat(path)
    return _copied(path, found.st_dev, found.st_ino)


@cache
def _copied(path: str, device: int, number: int) -> PipeCopy:
    folder = tempfile.mkdtemp(prefix="jaxblt-pipe-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    raw, most, held = Path(folder, "raw"), min(MOST_SPOOLED, shutil.disk_usage(folder).free // 2), 0
    with open(path, "rb") as pipe, open(raw, "wb") as file:
        while part := pipe.read(_CHUNK):
            held += file.write(part)
            if held > most:
                file.truncate(0)
                raise OSError(
                    f"the pipe {path!r} holds more than {most:,} bytes: write them to a file, and name it"
                )
    copy = PipeCopy(folder, f"pipe{_ENDINGS.get(_first_byte(raw), '')}")
    os.replace(raw, copy)
    copy.url = path
    return copy


def _first_byte(path: Path) -> bytes:
    """Return the first byte of a text; what cannot be read is told by the reader."""
    with contextlib.suppress(ValueError, OSError), open_text(path) as file:
        return file.read(1)
    return b""
