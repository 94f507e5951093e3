"""Trained runs that come with jaxblt, by name: `jaxblt.load("english")`.

A run is a zip archive of its folder, beside a card that says what it was trained on and what it is not for. Its folder
is unpacked once into the user's cache, under the archive's hash.
"""

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from jaxblt.remote.cache import user_cache

HERE = Path(__file__).parent
MOST_NAMED, MOST_ENTRIES = 5, 10_000
"""Most runs that an error names, and most entries of a folder that are searched for runs."""


@cache
def boxed() -> dict[str, dict[str, Any]]:
    """Return what is said of each run: its hash, a title, and figures with the baselines beside them."""
    return json.loads((HERE / "boxed.json").read_text(encoding="utf-8"))


def is_boxed(run_dir: str | os.PathLike[str]) -> bool:
    """Return whether a run is named that comes with jaxblt. A folder of that name goes first."""
    return str(run_dir) in boxed() and not Path(run_dir).exists()


def suggestion(run_dir: str | os.PathLike[str], file: str) -> str:
    """Return the end of an error on a folder without a run: which run may have been meant. It may be empty.

    It names the run that the path lies in, or the run in the box or beside the folder whose name is nearest. If no name
    is near, it lists the runs in the folder, or those beside it.

    Args:
      run_dir: the folder.
      file: the name of a file that a run's folder holds.
    """
    folder = Path(run_dir)
    for parent in (folder.parent, folder.parent.parent):
        if folder.exists() and (parent / file).is_file():
            return f"; it lies in a run: name {str(parent)!r}"
    beside, inside = _runs_in(folder.parent, file), _runs_in(folder, file)
    if near := difflib.get_close_matches(str(run_dir), boxed(), n=1):
        return f"; did you mean {near[0]!r}, which comes with jaxblt?"
    if near := difflib.get_close_matches(folder.name, beside, n=1):
        return f"; did you mean {str(folder.parent / near[0])!r}?"
    for place, names in ((folder, inside), (folder.parent, beside)):
        if names:
            more = ", ..." if len(names) > MOST_NAMED else ""
            return f"; runs in {str(place)!r} are {', '.join(names[:MOST_NAMED])}{more}"
    return ""


def _runs_in(folder: Path, file: str) -> list[str]:
    """Return the sorted names of the runs in a folder, among its first `MOST_ENTRIES` entries."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        some = itertools.islice(entries, MOST_ENTRIES)
        return sorted(entry.name for entry in some if os.path.isfile(os.path.join(entry.path, file)))
    return []


def unpacked(name: str) -> Path:
    """Return the folder of a run that comes with jaxblt.

    Raises:
      KeyError: there is none of that name.
      ValueError: the archive is not the one that was released.
    """
    expected = boxed()[name]["sha256"]
    folder = user_cache("boxed") / f"{name}-{expected[:16]}"
    if folder.exists():
        return folder
    archive = HERE / f"{name}.zip"
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != expected:
        raise ValueError(
            f"{archive.name} has the SHA-256 {found[:16]}..., expected {expected[:16]}...: install jaxblt again"
        )
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{name}-"))
    try:
        with zipfile.ZipFile(archive) as file:
            file.extractall(made)
        made.chmod(0o755)
        with contextlib.suppress(OSError):  # Keep the folder of another process that was faster
            made.rename(folder)
        if not folder.exists():
            raise ValueError(
                f"{archive.name} could not be unpacked to {folder}: look whether it can be written"
            )
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
