"""Finds files: paths, globs, URLs, pipes and folders of saved datasets."""

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from jaxblt.data.sources.opening import empty, is_compressed_name, is_empty, name_of
from jaxblt.data.sources.pipes import is_pipe, spooled
from jaxblt.data.sources.saved import saved_files
from jaxblt.remote import cached_copies, url_of
from jaxblt.validation import check_kind

SHOWN = 8
"""Names that a warning lists."""


class EmptyFileWarning(UserWarning):
    """Files that a glob matches hold no byte and are left out."""


def expand(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    """Return the files that paths and globs name, each once.

    They stand in the order given, those of each glob sorted. URLs (`https://`, `s3://`, `gs://`, `hf://`) become local
    copies, see `jaxblt.remote`, and so do pipes; `name_of` tells what they were. A folder that `datasets` saved stands
    for its Arrow files.

    Raises:
      TypeError: one of them is no path.
      FileNotFoundError: a path or glob names no file.
      IsADirectoryError: a path is a folder.
      ValueError: no path was given, a glob names empty files only, or a file and a compressed copy of it are named.

    Warns:
      EmptyFileWarning: empty files of a glob are left out.
    """
    found: dict[str, Path] = {}
    place = _placing()
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        paths = [paths]
    for path in paths:
        check_kind("a path", path, str, os.PathLike, fix="write it as text, or as a pathlib.Path")
        for file in _matches(os.path.expanduser(os.fspath(path))):
            found.setdefault(place(os.fspath(file)), file)
    if not found:
        raise ValueError("no path was given: name at least one file or glob")
    _check_copies(found.values())
    return list(found.values())


def _placing() -> Callable[[str], str]:
    """Return a function that tells where a file stands: links to its folder are followed, once for each folder."""
    real = cache(os.path.realpath)
    return lambda file: os.path.join(real(os.path.dirname(file)), os.path.basename(file))


def _once(files: Iterable[str]) -> list[str]:
    """Return each file once, by its shortest path, sorted: links may lead a glob in a circle.

    Of paths of one length it is the first in the alphabet. A folder lists its files in any order.
    """
    found: dict[str, str] = {}
    place = _placing()
    for file in sorted(files, key=lambda file: (len(file), file)):
        found.setdefault(place(file), file)
    return sorted(found.values())


def expand_one(path: str | os.PathLike) -> Path:
    """Return the file that a path names, see `expand`.

    Raises:
      ValueError: it is a glob that names several.
    """
    files = expand(path)
    if len(files) > 1:
        raise ValueError(f"{os.fspath(path)!r} names {len(files)} files, where one is read: name one of them")
    return files[0]


def _check_copies(files: Iterable[Path]) -> None:
    """Raise ValueError for a file in two forms, plain or compressed: it would be read twice."""
    found: dict[str, str] = {}
    for name in map(name_of, files):
        plain = os.path.splitext(name)[0] if is_compressed_name(Path(name)) else name
        other = found.setdefault(url_of(plain) or os.path.abspath(plain), name)
        if other != name:
            raise ValueError(
                f"{other!r} and {name!r} are one file twice, of which one is compressed: name one, or move the other "
                "away"
            )


def _matches(pattern: str) -> Sequence[Path]:
    if (url := url_of(pattern)) is not None:
        copies = cached_copies(url)
        return _without_empty(pattern, copies) if glob.has_magic(pattern) else copies
    if os.path.isdir(pattern):
        if (files := saved_files(Path(pattern))) is not None:
            return files
        raise IsADirectoryError(
            f"{pattern!r} is a folder: name its files, such as {pattern.rstrip('/') + '/*.txt'!r}"
        )
    if os.path.lexists(pattern):
        return [_file(pattern)]
    hits = [_file(p) for p in _once(_glob(pattern)) if not os.path.isdir(p)]
    if not hits:
        what = "glob matches no file" if glob.has_magic(pattern) else "file does not exist"
        raise FileNotFoundError(f"{what}: {pattern!r} (looked from {os.getcwd()!r})")
    return _without_empty(pattern, hits)


def _file(path: str) -> Path:
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path!r} is a link to {os.readlink(path)!r}, which leads to no file: mend the link, or remove it"
        )
    return spooled(path) if is_pipe(path) else Path(path)


def _glob(pattern: str) -> list[str]:
    """Find what a glob names.

    Its leading folders are taken by their names as far as they exist: `lr=[1e-3]/*.txt`.
    """
    folder, rest = "", pattern
    while rest and os.path.isdir(longer := os.path.join(folder, rest.partition("/")[0] or "/")):
        folder, rest = longer, rest.partition("/")[2].lstrip("/")
    return [os.path.join(folder, name) for name in glob.glob(rest, root_dir=folder or None, recursive=True)]


def _without_empty(pattern: str, files: Sequence[Path]) -> list[Path]:
    """Leave out a glob's files without a byte, which failed downloads leave behind."""
    held: list[Path] = []
    left: list[str] = []
    for file in files:
        if is_empty(file):
            left.append(name_of(file))
        else:
            held.append(file)
    if not held:
        raise empty(files[0])
    if left:
        names = ", ".join(left[:SHOWN]) + ", ..." * (len(left) > SHOWN)
        warnings.warn(
            f"{len(left)} of {len(files)} files of {pattern!r} are empty and left out: {names}",
            EmptyFileWarning,
            stacklevel=2,
        )
    return held
