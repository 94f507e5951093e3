"""Files that commands write: never their own input, nothing that is there unless asked, whole or not at all."""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxblt.remote import refuse_remote, url_of

Name = str | os.PathLike[str]
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk or a quota that is full."""


def check_output(option: str, path: Name, *, inputs: Iterable[Name] = (), overwrite: bool = False) -> None:
    """Check that a command may write a file; call it before the work that the file is to hold.

    Args:
      option: that names the file, for the message.
      path: of the file.
      inputs: files that the command reads, and folders of which it reads any file.
      overwrite: whether a file that is there may be replaced.

    Raises:
      FileExistsError: the file is there, and is not to be overwritten.
      PermissionError: its folder cannot be written.
      ValueError: it is a URL, an input by whatever name, or something else than a regular file.
    """
    refuse_remote(option, path)
    for given in inputs:
        if not url_of(given) and _is_of(path, given):
            raise ValueError(
                f"{option} {path} is read by this command, as {given}: it would be lost; choose another name"
            )
    if not os.path.exists(path):
        _check_folder(option, path)
        return
    if not os.path.isfile(path):
        raise ValueError(f"{option} {path} is no regular file: name a file to write")
    if not overwrite:
        raise FileExistsError(
            f"{option} {path} is there already, and nothing is overwritten: choose another name, or say "
            "--overwrite (overwrite=True)"
        )


def _check_folder(option: str, path: Name) -> None:
    """Raise PermissionError if a file cannot be made, in its folder or in the nearest one that is there."""
    folder = os.path.dirname(os.path.realpath(path))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise PermissionError(
            f"{option} {path} cannot be made: {folder} is no folder that can be written; name another"
        )


def _is_of(path: Name, given: Name) -> bool:
    """Return whether a path is a file, or lies in a folder, through any links and spellings."""
    real, root = os.path.realpath(path), os.path.realpath(given)
    if os.path.isdir(root):
        return os.path.commonpath([real, root]) == root
    return real == root or (os.path.exists(real) and os.path.exists(root) and os.path.samefile(real, root))


@contextlib.contextmanager
def whole_file(path: Name) -> Iterator[Path]:
    """Yield a path beside `path`, renamed to `path` once the block ends without an error.

    Missing folders are made. Where `path` is a link, the file that it leads to is replaced.

    Raises:
      OSError: the disk or the quota is full; the error names `path`.
    """
    refuse_remote("out", path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, target)
    except Exception as error:
        if not is_full(error):
            raise
        said = "no space left on its disk: free some, or name another file"
        raise OSError(errno.ENOSPC, said, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came of, says that a disk or a quota is full."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in FULL) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_text(path: Name, text: str) -> None:
    """Write a file of UTF-8 text, whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
