"""Local copies of remote files, which are read at random: each version of a file is downloaded once."""

import glob
import hashlib
import os
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from jaxblt.remote.store import WEB, matching, opened, save
from jaxblt.remote.urls import scheme_of


def user_cache(name: str) -> Path:
    """jaxblt's folder of this name in the user's cache: below `XDG_CACHE_HOME`, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxblt" / name


class RemoteCopy(Path):
    """The path of a local copy, which is called by the URL that it was taken from."""

    url: str = ""


def cached_copies(pattern: str) -> list[RemoteCopy]:
    """Local copies of the files that a URL or a glob names (of an object store), in the order of their names.

    A copy lies in a folder named by the hash of URL, size and version. A file that changes is downloaded anew.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: a package is missing.
      OSError: it cannot be reached.
    """
    if scheme_of(pattern) in WEB or not glob.has_magic(pattern):
        return [_copy(pattern)]
    urls = matching(pattern)
    if not urls:
        raise FileNotFoundError(f"glob matches no file: {pattern!r}")
    return [_copy(url) for url in urls]


def _copy(url: str) -> RemoteCopy:
    with opened(url) as (file, stream):
        key = hashlib.sha256(repr((url, file.size, file.version)).encode()).hexdigest()[:32]
        name = PurePosixPath(urlsplit(url).path).name or "index"
        copy = RemoteCopy(user_cache("remote") / key / name)
        copy.url = url
        # Without a version nothing tells whether a copy is the file of now.
        if not file.version or not copy.exists():
            save(stream, copy, size=file.size)
        return copy
