"""Local folders as Orbax takes them: their names are no patterns, and nobody asks who owns a file."""

import glob
import os
from collections.abc import Iterator
from typing import Self

from etils.epath.gpath import PosixGPath
from etils.epath.stat_utils import StatResult

from jaxblt.remote import refuse_remote

TAKEN_FOR_URLS = ("/gs/", "/s3/", "/az/", "/hf/")
"""Folders whose files etils looks for in object stores."""


class LocalPath(PosixGPath):
    """The path of a folder that Orbax writes to; paths made of it are of this class too."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """Find what a pattern names in this folder, whose own name is no pattern: sweeps call runs `lr=[1e-3]`."""
        for name in glob.glob(pattern, root_dir=os.fspath(self)):
            yield self / name

    def stat(self) -> StatResult:
        """Describe a file without its owner: in containers many a user has no name."""
        found = os.stat(self)
        return StatResult(is_directory=self.is_dir(), length=found.st_size, mtime=int(found.st_mtime))


def to_local_path(directory: str | os.PathLike[str]) -> LocalPath:
    """Return the absolute path of a folder for Orbax.

    Raises:
      ValueError: Orbax would read and write somewhere else.
    """
    # Orbax would write s3:// below the working folder; `remote_run` carries steps over.
    refuse_remote("directory", directory)
    path = os.path.abspath(os.path.expanduser(os.fspath(directory)))
    if "\\" in path or path != path.encode("utf-8", "replace").decode():
        raise ValueError(f"{path!r} cannot hold checkpoints: rename it to UTF-8 without backslashes")
    if path.startswith(TAKEN_FOR_URLS):
        raise ValueError(f"{path!r} would be taken for a URL: mount {path[:3]} under another name")
    return LocalPath(path)
