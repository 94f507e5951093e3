"""The data of the built-in recipes: jaxblt data fetch books, and pictures of them: jaxblt data draw pathfinder."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from jaxblt import recipes
from jaxblt.cli.catalogue import ROOT, Dataset, catalogue, dataset_of, fetch_hint, folder_of
from jaxblt.cli.download import LOCK, Unreachable, obtain
from jaxblt.data.sources import FastaSource
from jaxblt.data.sources.interval_sets import write_interval_set
from jaxblt.data.tasks import ListOps, Pathfinder, PixelClasses
from jaxblt.data.tasks.language_pairs import write_language_pairs
from jaxblt.data.tasks.listops_files import write_files
from jaxblt.data.tasks.pixels.drawn_files import write_images
from jaxblt.data.tasks.pixels.picture import draw_sheet
from jaxblt.outputs import whole_file
from jaxblt.validation import perhaps

USAGE = """usage: jaxblt data fetch NAME [NAME ...]
       jaxblt data draw RECIPE FILE.png
       jaxblt data cut FOLDER GENOME.fa OUT.csv

Makes the data of recipes in {root}/, below the current folder. Each file is checked by its SHA-256. A file that is
there is not fetched again, and a folder that was drawn is not drawn again. NAME is a recipe or a data set:

{sets}

`language_pairs`, `listops`, `pathfinder`, `path_x` and `path_256` are drawn, on all cores. For `imdb` and
`cifar10_gray` put files of your own into {root}/imdb and {root}/cifar10_gray.
Other recipes need no files: their data are embedded, or made by the recipe.

`draw` writes the first test images of a recipe on images, with a row for each class, and replaces no file. `cut` makes
a table for `jaxblt finetune --data.split column` of a set of Genomic Benchmarks (train/CLASS.csv and test/CLASS.csv of
region, start, end, strand) and the genome that its intervals are of."""


def _listops(folder: Path) -> None:
    write_files(ListOps(train_size=96_000, eval_size=2000), folder)


SHORTER = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
"""Segments of the contours of easier images: a model learns to follow a contour step by step."""


def _images(folder: Path, task: Pathfinder, images: int, easier_images: int) -> None:
    easier = replace(task, contours=SHORTER, sets_seed=1)
    write_images(task, folder, images, easier=easier, easier_images=easier_images)


MADE: dict[str, Callable[[Path], None]] = {
    "listops": _listops,
    "language_pairs": lambda folder: write_language_pairs(
        folder, {"train": 40_000, "eval": 2000, "test": 2000}
    ),
    "pathfinder": partial(_images, task=Pathfinder(), images=120_000, easier_images=80_000),
    "path_x": partial(_images, task=Pathfinder.path_x(), images=56_000, easier_images=40_000),
    "path_256": partial(_images, task=Pathfinder.path_256(), images=56_000, easier_images=40_000),
}
"""Data sets that are drawn: what writes them into a folder."""
_GENES = "what `python -m experiments.genes markers.fasta` writes: the marker genes of MetaPhlAn 2 and their proteins"
BROUGHT = {
    "english": "folders train, validation and test of .txt files, such as those of `jaxblt data fetch books`",
    "genes": _GENES,
    "proteins": _GENES,
    "cifar10_gray": "train_x.npy, train_y.npy, test_x.npy and test_y.npy: uint8 images of 32 x 32 grey levels, classes",
    "imdb": "train*.tsv and test*.tsv of label, tab and text, or the folders train and test of its release",
}
"""Data sets that have no address to fetch them from: what to put into their folder."""


def main(argv: Sequence[str]) -> int:
    """Fetch or draw what `argv` names; without a name, print what there is.

    Raises:
      ValueError: there is no such action, recipe or data set; or a file has another checksum.
      Unreachable: an address does not answer.
    """
    if not argv or {"-h", "--help"} & set(argv):
        print(usage())
        return 0 if argv else 2
    action, *names = argv
    if action == "draw":
        return draw(names)
    if action == "cut":
        return cut(names)
    if action != "fetch":
        raise ValueError(
            f"unknown action {action!r}: jaxblt data fetch NAME, jaxblt data draw RECIPE FILE.png, or jaxblt data cut "
            "FOLDER GENOME.fa OUT.csv"
        )
    if not names:
        raise ValueError(f"name what to fetch: {', '.join(catalogue())}")
    for made in [name for name in dict.fromkeys(names) if name in MADE]:
        _make(made, Path(ROOT, made))
    for dataset in dict.fromkeys(find(name) for name in names if name not in MADE):
        if dataset is not None:
            fetch(dataset)
    return 0


def _make(name: str, folder: Path) -> None:
    """Draw a data set into a folder that is not there yet; a folder is there whole or not at all."""
    if folder.exists():
        print(f"{folder}: there already; remove it to draw it again")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        MADE[name](Path(scratch, name))
        Path(scratch, name).rename(folder)
    print(f"{folder}: drawn")


def draw(argv: Sequence[str]) -> int:
    """Write a sheet of the test images of a recipe.

    Raises:
      ValueError: there are not a recipe and a file, or the recipe reads no images.
      FileExistsError: the file is there.
      FileNotFoundError: the images are not.
    """
    if len(argv) != 2:
        raise ValueError(
            f"expected a recipe and a file, got {list(argv)}: jaxblt data draw pathfinder sheet.png"
        )
    name, out = argv
    recipe = recipes.get(name)
    task = getattr(recipe.data, "task", None)
    if not isinstance(task, PixelClasses | Pathfinder):
        drawable = [
            n for n in recipes.RECIPES if isinstance(getattr(recipes.get(n).data, "task", 0), PixelClasses)
        ]
        raise ValueError(f"recipe {name!r} reads no images, choose one of: {', '.join(drawable)}")
    if Path(out).exists():
        raise FileExistsError(f"{out} is there already, and nothing is overwritten: choose another name")
    try:
        sheet = draw_sheet(task.open("test"), task.num_answers)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{fetch_hint(recipe)}") from error
    with whole_file(out) as partial_file:
        partial_file.write_bytes(sheet)
    print(f"{out}: row k shows class k")
    return 0


def cut(argv: Sequence[str]) -> int:
    """Write the labelled intervals of a set of Genomic Benchmarks as a table.

    Raises:
      ValueError: there are not a folder, a genome and a file; or the set and the genome do not fit.
      FileExistsError: the file is there.
    """
    if len(argv) != 3:
        raise ValueError(
            f"expected a folder, a genome and a file, got {list(argv)}: jaxblt data cut human_nontata_promoters "
            "hg38.fa promoters.csv"
        )
    folder, genome, out = argv
    if Path(out).exists():
        raise FileExistsError(f"{out} is there already, and nothing is overwritten: choose another name")
    parts = write_interval_set(folder, FastaSource(genome), out)
    print(f"{out}: " + ", ".join(f"{count:,} of {part}" for part, count in parts.items()))
    return 0


def usage() -> str:
    """List data sets, and the recipes that read them."""
    readers = {name: dataset_of(recipes.get(name)) for name in recipes.RECIPES}
    lines = []
    for name, dataset in catalogue().items():
        of = ", ".join(recipe for recipe, read in readers.items() if read == dataset and recipe != name)
        size = sum(file.size or 0 for file in dataset.files) / 1e6
        lines.append(f"  {name:8} {dataset.about}, {size:.0f} MB" + (f" (also {of})" if of else ""))
    return USAGE.format(root=ROOT, sets="\n".join(lines))


def find(name: str) -> Dataset | None:
    """Return the data set of that name, or of the recipe of that name.

    None, and a printed line, if the recipe needs none.

    Raises:
      ValueError: there is neither, or it has no address to fetch it from.
    """
    if name in recipes.RECIPES:
        name = folder_of(recipes.get(name)) or name
    if name in BROUGHT:
        raise ValueError(f"{name} cannot be fetched: put into {Path(ROOT, name)} {BROUGHT[name]}")
    if name in catalogue():
        return catalogue()[name]
    if name not in recipes.RECIPES:
        names = dict.fromkeys([*catalogue(), *recipes.RECIPES])
        hint = perhaps(name, names)
        raise ValueError(f"no data set and no recipe {name!r}{hint}, choose one of: {', '.join(names)}")
    found = dataset_of(recipes.get(name))
    if found is None:
        print(f"{name}: nothing to fetch, its data are embedded or made by the recipe")
    return found


def fetch(dataset: Dataset) -> None:
    """Make all files of a data set that are not there.

    Raises:
      Unreachable: an address does not answer; says what to put where.
      ValueError: a file has another checksum.
    """
    print(f"{dataset.name}: {dataset.about}; {dataset.licence}")
    new = 0
    for file in tqdm(dataset.files, unit="file", disable=None, leave=False):
        try:
            new += obtain(file, dataset.folder)
        except Unreachable as error:
            raise Unreachable(without_network(dataset, file.path, error)) from error
    held = sum((dataset.folder / file.path).stat().st_size for file in dataset.files)
    print(f"{dataset.folder}: {len(dataset.files)} files ({new} new), {held:,} bytes, all checked")


def without_network(dataset: Dataset, path: str, error: Unreachable) -> str:
    """Say in one line what to do where an address cannot be reached."""
    missing = sum(not (dataset.folder / file.path).exists() for file in dataset.files)
    fetched = next(file for file in dataset.files if file.path == path)
    checksum = f"SHA-256 {fetched.sha256}" if fetched.sha256 else f"its SHA-256 goes into {LOCK}"
    return (
        f"{error}: run `jaxblt data fetch {dataset.name}` where there is a network and copy the folder to "
        f"{Path(dataset.folder).resolve()}; {missing} of {len(dataset.files)} files are missing, the first is "
        f"{dataset.folder / path} ({checksum}) from {fetched.url}"
    )
