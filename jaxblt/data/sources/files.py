"""Finding and opening files: globs, URLs, and plain, gzip and xz files alike."""

import glob
import gzip
import io
import lzma
import os
import re
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxblt.remote import cached_copies, url_of

COMPRESSED = (".gz", ".xz")
FIRST_BYTES = {
    "gzip": rb"\x1f\x8b\x08",
    "xz": rb"\xfd7zXZ\x00",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "bzip2": rb"BZh[1-9]1AY&SY",
    "zip": rb"PK\x03\x04",
}
"""Patterns of what compressed files begin with."""
_DAMAGED = (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError)


def expand(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    """The files that paths and globs name: in the order given, each glob sorted, each file once.

    URLs (`https://`, `s3://`, `gs://`, `hf://`) become local copies, see `jaxblt.remote`; `name_of` tells their URLs.

    Raises:
      FileNotFoundError: a path or glob names no file.
      IsADirectoryError: a path is a folder.
      ValueError: no path was given, or they name a file and a compressed copy of it.
    """
    found: dict[str, Path] = {}
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for file in _matches(os.path.expanduser(os.fspath(path))):
            found.setdefault(os.path.abspath(file), file)
    if not found:
        raise ValueError("no path was given: name at least one file or glob")
    _check_copies(found.values())
    return list(found.values())


def _check_copies(files: Iterable[Path]) -> None:
    """Raises ValueError for a file that is there plain and compressed, or compressed twice: it would be read twice."""
    found: dict[str, str] = {}
    for name in map(name_of, files):
        plain = name[:-3] if name.endswith(COMPRESSED) else name
        other = found.setdefault(url_of(plain) or os.path.abspath(plain), name)
        if other != name:
            raise ValueError(
                f"{other!r} and {name!r} are one file twice, of which one is compressed: name one, or move the other "
                "away"
            )


def name_of(path: Path) -> str:
    """What a file is called: its path, or the URL of which it is a copy."""
    return getattr(path, "url", "") or str(path)


def _matches(pattern: str) -> list[Path]:
    if (url := url_of(pattern)) is not None:
        return list(cached_copies(url))
    if os.path.isdir(pattern):
        raise IsADirectoryError(
            f"{pattern!r} is a folder: name its files, such as {pattern.rstrip('/') + '/*.txt'!r}"
        )
    if os.path.exists(pattern):
        return [Path(pattern)]
    hits = [Path(p) for p in sorted(_glob(pattern)) if not os.path.isdir(p)]
    if not hits:
        what = "glob matches no file" if glob.has_magic(pattern) else "file does not exist"
        raise FileNotFoundError(f"{what}: {pattern!r} (looked from {os.getcwd()!r})")
    return hits


def _glob(pattern: str) -> list[str]:
    """Find what a glob names; its leading folders are taken by their names as far as they exist: `lr=[1e-3]/*.txt`."""
    folder, rest = "", pattern
    while rest and os.path.isdir(longer := os.path.join(folder, rest.partition("/")[0] or "/")):
        folder, rest = longer, rest.partition("/")[2].lstrip("/")
    return [os.path.join(folder, name) for name in glob.glob(rest, root_dir=folder or None, recursive=True)]


def open_bytes(path: Path) -> io.BufferedIOBase:
    """Opens a file for reading bytes, through gzip or lzma where the name ends so."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def read_all(path: Path) -> bytes:
    """Every byte of a file, decompressed.

    Raises:
      ValueError: the file is empty, or is no (whole) gzip or xz file though its name says so.
    """
    try:
        with open_bytes(path) as file:
            data = file.read()
    except _DAMAGED as error:
        raise ValueError(
            f"{name_of(path)!r} is damaged or not a {path.suffix} file ({error}): copy it again"
        ) from error
    if not data:
        raise empty(path)
    return data


class CompressedBytesWarning(UserWarning):
    """A compressed file is read as it lies, as its name ends in neither .gz nor .xz."""


def warn_compressed(path: Path) -> None:
    """Warns if a file that is read as it lies begins as compressed ones do."""
    with open(path, "rb") as file:
        head = file.read(16)
    fixes = {"gzip": "let its name end in .gz", "xz": "let its name end in .xz"}
    for kind, pattern in FIRST_BYTES.items():
        if re.match(pattern, head):
            warnings.warn(
                f"{name_of(path)!r} begins as {kind} files do, and its bytes are read as they lie: "
                f"{fixes.get(kind, 'decompress it')}",
                CompressedBytesWarning,
                stacklevel=2,
            )


def empty(path: Path) -> ValueError:
    """The error of a file without a byte."""
    return ValueError(
        f"{name_of(path)!r} is empty (0 bytes): remove it from the paths, or check how it was written"
    )
