"""Checkpoints on another disk: where the folders of a run may be links, for those who read it and those who train it.

A link in a folder of somebody else's could lead to the checkpoints of another run. Reading them would give its weights
away, and training would remove its steps.
"""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from jaxblt.training.stored.frozen_store import frozen_dir
from jaxblt.training.stored.resolved import checkpoint_dir
from jaxblt.training.stored.safe_files import UnsafeFile, is_outside, read_text, replace_text, sizes_below

ID_FILE = "run_id"
MOST_ID = 100


def check_stored(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the folders that `checkpoints` and `frozen` are linked to, once both may be opened.

    A link is followed if the user owns it and the folder that it leads to. It is also followed if that folder is empty,
    or says that it is this run's. What both hold has to be regular files of theirs.

    Raises:
      UnsafeFile: a link is not followed; or a file is no regular one, or leads elsewhere.
    """
    links = list(_find_links(run_dir))
    for link in links:
        if not link.is_dir():
            raise UnsafeFile(f"{link} is a link to {os.readlink(link)}, which is no folder: make it first")
        if not _is_followed(link, run_dir):
            raise UnsafeFile(
                f"{link} leads out of {run_dir}, to {os.path.realpath(link)}, which is somebody else's and does not "
                f"say that it is this run's: if it is, write one word into the files {ID_FILE} of both folders"
            )
    for folder in _stored_folders(run_dir):
        sum(sizes_below(folder))
    return [Path(os.path.realpath(link)) for link in links]


def sign_links(run_dir: str | os.PathLike[str]) -> None:
    """Have the folders that a run is linked to say that they are its own, so that others may read it too."""
    for link in _find_links(run_dir):
        if _read_id(run_dir) is None:
            replace_text(Path(run_dir) / ID_FILE, secrets.token_hex(16) + "\n")
        if _read_id(link) is None:
            replace_text(link / ID_FILE, f"{_read_id(run_dir)}\n")


def _stored_folders(run_dir: str | os.PathLike[str]) -> tuple[Path, Path]:
    return checkpoint_dir(run_dir), frozen_dir(run_dir)


def _find_links(run_dir: str | os.PathLike[str]) -> Iterator[Path]:
    return (folder for folder in _stored_folders(run_dir) if is_outside(folder, run_dir))


def _read_id(folder: str | os.PathLike[str]) -> str | None:
    """Return the word that says whose a folder is; None without one."""
    try:
        return read_text(Path(folder) / ID_FILE, folder, most=MOST_ID).strip() or None
    except FileNotFoundError:
        return None


def _is_followed(link: Path, run_dir: str | os.PathLike[str]) -> bool:
    is_mine = {os.lstat(link).st_uid, os.stat(link).st_uid} == {os.geteuid()}
    if is_mine or not any(link.iterdir()):
        return True
    found = _read_id(link)
    return found is not None and found == _read_id(run_dir)
