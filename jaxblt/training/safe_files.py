"""Files of a folder that nobody vouches for: judged by name and `stat` before a byte of them is read."""

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MAX_LINE = 500


class UnsafeFile(ValueError):
    """A file that is not to be opened: it lies elsewhere, is no regular file, or is too large."""


def one_line(error: BaseException) -> str:
    """What `error` says, as one line of at most 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 3] + "..."


def check_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Raises UnsafeFile if `path`, with its symbolic links followed, does not lie inside `folder`."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    if os.path.commonpath([real, root]) != root:
        raise UnsafeFile(f"{path} leads out of {folder}, to {real}: put a copy of it into the folder")


def size_of(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, most: int | None = None) -> int:
    """Bytes of a regular file inside `folder`; nothing is opened, as opening a FIFO would wait for ever.

    Raises:
      FileNotFoundError: it is not there.
      UnsafeFile: it leads out of the folder, is no regular file, or has more than `most` bytes.
    """
    check_inside(file, folder)
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFile(
            f"{file} is not a regular file but {stat.filemode(found.st_mode)}: replace or remove it"
        )
    if most is not None and found.st_size > most:
        raise UnsafeFile(f"{file} has {found.st_size} bytes, expected at most {most}: it is no such file")
    return found.st_size


def read_json(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, most: int) -> Any:
    """The JSON in a file inside `folder` of at most `most` bytes.

    Raises:
      FileNotFoundError: it is not there.
      UnsafeFile: as of `size_of`.
      ValueError: it is not JSON in UTF-8; names the file.
    """
    size_of(file, folder, most=most)
    try:
        return json.loads(Path(file).read_bytes().decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {one_line(error)}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")
