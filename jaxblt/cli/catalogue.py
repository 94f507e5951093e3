"""The origin of the built-in recipes' data: one JSON file of `datasets/` a data set.

A checksum of null is one that nobody has established: it is recorded at the first download, in a file beside the data.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from jaxblt.data.config import DataConfig
from jaxblt.data.task_data import TaskDataConfig
from jaxblt.training.recipe import Recipe

ROOT = "data"
"""The folder, below the current one, in which recipes look for their data."""


@dataclass(frozen=True)
class Download:
    """One file of a data set.

    Attributes:
      path: below the data set's folder; a path that ends in .xz is compressed when it is stored.
      url: of its contents.
      size: bytes of the contents as they are checked; None if not known.
      sha256: of the same bytes; None if not known.
      header: for FASTA, the first line that the contents get; its sequence is broken into lines of 60 letters.
    """

    path: str
    url: str
    size: int | None
    sha256: str | None
    header: str | None = None


@dataclass(frozen=True)
class Dataset:
    """Files that recipes read.

    Attributes:
      name: of the data set, and of its folder below `ROOT`.
      about: what it holds.
      licence: and source.
      files: all of them.
    """

    name: str
    about: str
    licence: str
    files: tuple[Download, ...]

    @property
    def folder(self) -> Path:
        return Path(ROOT, self.name)


@cache
def catalogue() -> dict[str, Dataset]:
    """Return all data sets by name."""
    found = sorted(files("jaxblt.cli").joinpath("datasets").iterdir(), key=lambda file: file.name)
    sets = [_read(json.loads(file.read_text(encoding="utf-8"))) for file in found]
    return {dataset.name: dataset for dataset in sets}


def _read(stored: dict) -> Dataset:
    listed = tuple(
        Download(f["path"], stored["base"] + f["from"], f["bytes"], f["sha256"], f.get("header"))
        for f in stored["files"]
    )
    return Dataset(stored["name"], stored["about"], stored["licence"], listed)


def dataset_of(recipe: Recipe) -> Dataset | None:
    """Return the data set that a recipe reads; None if it reads other files or none."""
    paths = files_of(recipe)
    for dataset in catalogue().values():
        if paths and all(Path(path).is_relative_to(dataset.folder) for path in paths):
            return dataset
    return None


def files_of(recipe: Recipe) -> tuple[str, ...]:
    """Return paths and globs that a recipe reads.

    There are none if its data are embedded, or made by its task.
    """
    if isinstance(recipe.data, DataConfig):
        return recipe.data.paths + tuple(path for own in recipe.data.sources for path in own.paths)
    if not isinstance(recipe.data, TaskDataConfig):
        return recipe.data.paths
    path = getattr(recipe.data.task, "path", None)
    return () if path is None else (path,)


def folder_of(recipe: Recipe) -> str | None:
    """Return the name of the folder below `ROOT` that all files of a recipe lie in; None if there is no such folder."""
    parts = [Path(file).parts for file in files_of(recipe)]
    names = {part[1] if len(part) > 1 and part[0] == ROOT else None for part in parts}
    return names.pop() if len(names) == 1 else None


def fetch_hint(recipe: Recipe) -> str:
    """Say what to do for a recipe whose data are missing and can be fetched; else nothing."""
    dataset, name = dataset_of(recipe), folder_of(recipe)
    if dataset is None and name is not None and not Path(ROOT, name).exists():
        return f"; `jaxblt data fetch {name}` makes {Path(ROOT, name)}, or says what to put there"
    if dataset is None or dataset.folder.exists():
        return ""
    return f"; `jaxblt data fetch {dataset.name}` makes {dataset.folder}"
