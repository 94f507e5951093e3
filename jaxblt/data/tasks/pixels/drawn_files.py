"""Pathfinder's images, drawn once into the arrays that `PixelClasses` reads: to draw one takes milliseconds."""

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.splits import PARTS
from jaxblt.data.tasks.generated import part_of
from jaxblt.data.tasks.pixels.pathfinder import Pathfinder, Picture
from jaxblt.data.tasks.pixels.raster import raster_row
from jaxblt.outputs import whole_file

_CHUNK = 256

Drawn = tuple[str, Picture]
"""The split that may hold a picture, and the picture."""


def write_images(
    task: Pathfinder,
    folder: Path,
    images: int,
    *,
    easier: Pathfinder | None = None,
    easier_images: int = 0,
    processes: int | None = None,
) -> None:
    """Draw images and write each to the split that its hash deals it to: six of eight are for training.

    Args:
      task: what is drawn.
      folder: for the arrays; it is made.
      images: of all splits together.
      easier: another task, of whose images those for training are added to training alone.
      easier_images: how many of it are drawn.
      processes: that draw; None for one on each core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = processes or os.cpu_count() or 1
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        each = partial(pool.map, chunksize=_CHUNK) if processes > 1 else map
        drawn = list(each(partial(_draw, task), range(images)))
        extra = [] if easier is None else list(each(partial(_draw, easier), range(easier_images)))
    for split in PARTS:
        _write(folder, split, [*drawn, *extra] if split == "train" else drawn)


def _draw(task: Pathfinder, number: int) -> Drawn:
    picture = task.picture(Draws(task.sets_seed, number))
    return part_of(raster_row(*picture)), picture


def _write(folder: Path, split: str, drawn: Iterable[Drawn]) -> None:
    pictures = [picture for part, picture in drawn if part == split]
    arrays = {"x": [p.pixels for p in pictures], "y": [p.label for p in pictures]}
    for name, values in arrays.items():
        with whole_file(folder / f"{split}_{name}.npy") as partial_file, partial_file.open("wb") as out:
            np.save(out, np.array(values, np.uint8))
