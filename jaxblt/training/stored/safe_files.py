"""Files of a folder that nobody vouches for: judged by name and `stat` before a byte of them is read or written."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

MAX_LINE = 500

MAX_DESCRIPTION = 1 << 25
"""The most bytes of a file that describes a checkpoint's arrays; Orbax reads such files whole."""


class UnsafeFile(ValueError):
    """A file that is not to be opened: it lies elsewhere, is no regular file, or is too large."""


def one_line(error: BaseException) -> str:
    """Write what `error` says as one line of at most 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 3] + "..."


def is_outside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Return whether `path`, with its symbolic links followed, lies outside `folder`."""
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, root]) != root


def check_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Raise UnsafeFile if `path`, with its symbolic links followed, does not lie inside `folder`."""
    if is_outside(path, folder):
        real = os.path.realpath(path)
        raise UnsafeFile(f"{path} leads out of {folder}, to {real}: put a copy of it into the folder")


def size_of(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, most: int | None = None) -> int:
    """Return the bytes of a regular file inside `folder`, unopened: opening a FIFO would wait for ever.

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


def _is_description(file: Path) -> bool:
    return file.suffix == ".json" or file.name.startswith("_") or file.parent.name == "array_metadatas"


def sizes_below(folder: str | os.PathLike[str]) -> Iterator[int]:
    """Return sizes of all files in a folder of checkpoints and in the folders below it.

    Files that vanish meanwhile are left out: a run may be writing.

    Raises:
      UnsafeFile: one leads out of the folder, is no regular file, or is a description too large to read.
    """
    for parent, folders, files in os.walk(folder):
        for name in folders:
            check_inside(Path(parent, name), folder)
        for file in (Path(parent, name) for name in files):
            with contextlib.suppress(FileNotFoundError):
                yield size_of(file, folder, most=MAX_DESCRIPTION if _is_description(file) else None)


def read_text(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, most: int) -> str:
    """Return the UTF-8 text of a file inside `folder` of at most `most` bytes.

    Raises:
      FileNotFoundError: it is not there.
      UnsafeFile: as of `size_of`.
      ValueError: it is not UTF-8.
    """
    size_of(file, folder, most=most)
    return Path(file).read_bytes().decode("utf-8")


def read_json(file: str | os.PathLike[str], folder: str | os.PathLike[str], *, most: int) -> Any:
    """Return the JSON in a file inside `folder` of at most `most` bytes.

    Raises:
      FileNotFoundError: it is not there.
      UnsafeFile: as of `size_of`.
      ValueError: it is not JSON in UTF-8; names the file.
    """
    try:
        return json.loads(read_text(file, folder, most=most), parse_constant=_refuse)
    except UnsafeFile:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {one_line(error)}") from error


def open_own(file: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file for writing, but through no link: somebody else may have put it into the folder.

    It serves as an `opener` of `open`.

    Raises:
      UnsafeFile: the file is a link.
    """
    try:
        return os.open(file, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UnsafeFile(f"{file} is a link, and nothing is written through it: remove it") from None


def replace_bytes(file: Path, content: bytes) -> None:
    """Write a file, or leave the old one where that is interrupted or the disk is full."""
    partial = file.with_suffix(".partial")
    # Remove what a killed process left, or a link
    partial.unlink(missing_ok=True)
    try:
        with open(partial, "xb", opener=open_own) as out:
            out.write(content)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(file: Path, text: str) -> None:
    """Write a file of UTF-8 text as `replace_bytes` does."""
    replace_bytes(file, text.encode("utf-8"))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number in JSON")
