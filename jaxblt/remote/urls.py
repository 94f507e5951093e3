"""The paths that are URLs."""

import os
import re
from pathlib import Path

from jaxblt.validation import check_kind

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
"""A scheme of two letters or more (one is a drive of Windows). `pathlib` leaves one slash of two."""


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Return the URL that a path is; None for a local path.

    Both slashes are put back; `file:///` has three.

    Raises:
      TypeError: `path` is neither text nor a path.
    """
    check_kind("a path", path, str, os.PathLike, fix="write it as text, or as a pathlib.Path")
    found = URL.fullmatch(os.fspath(path))
    if found is None:
        return None
    scheme = found[1].lower()
    # Keep the root: the files of file://data/a would be looked for below the working directory
    return f"{scheme}://{'/' if scheme == 'file' else ''}{found[2].rstrip('/')}"


def scheme_of(url: str) -> str:
    """Return what stands before `://`."""
    return url.partition("://")[0]


def refuse_remote(what: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a path that must be local is a URL, or `-` for standard input or output.

    Writing to it would make a folder named `s3:`, or a file named `-`.
    """
    if Path(path).parts[:1] == ("-",):
        raise ValueError(
            f"{what} {path} would be a file of that name, not standard input or output: name another"
        )
    url = url_of(path)
    if url is not None:
        raise ValueError(
            f"{what}={url!r} is remote: {scheme_of(url)}:// cannot be used here; name a local path, and copy it over"
        )
