"""Local copies of remote files, which are read at random: each version of a file is downloaded once."""

import atexit
import contextlib
import glob
import hashlib
import logging
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from jaxblt.remote.store import WEB, matching, opened, save
from jaxblt.remote.urls import scheme_of

logger = logging.getLogger(__name__)


def user_cache(name: str) -> Path:
    """Return jaxblt's folder of this name in the user's cache.

    It is below `XDG_CACHE_HOME`, else ~/.cache. In a container the user may have no home, or none to write to. Then it
    lies in a temporary folder, which the end of the process removes.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(root) / "jaxblt" / name
    # Avoid a folder called "~", which stays where nothing tells the user's home
    if folder.is_absolute():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        return folder
    folder = _make_stand_in(root) / name
    folder.mkdir(exist_ok=True)
    return folder


@lru_cache(maxsize=1)
def _make_stand_in(root: str) -> Path:
    """Make a temporary folder in place of the user's cache, and say so."""
    made = tempfile.mkdtemp(prefix="jaxblt-cache-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    logger.warning(
        "no cache can be kept in %s: it is %s until this process ends; set XDG_CACHE_HOME to a folder of yours",
        *(root, made),
    )
    return Path(made)


class RemoteCopy(Path):
    """The path of a local copy, which is called by the URL that it was taken from."""

    url: str = ""


def cached_copies(pattern: str) -> list[RemoteCopy]:
    """Return local copies of the files that a URL or a glob names, in the order of names.

    Globs are of object stores. A copy lies in a folder named by the hash of URL, size and version. A file that changes
    is downloaded anew.

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
        # Fetch again: without a version nothing tells whether a copy is still the file.
        if not file.version or not copy.exists():
            save(stream, copy, size=file.size)
        return copy
