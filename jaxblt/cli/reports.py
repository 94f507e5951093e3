"""Parts that commands of answers share: regions of a genome in, tracks and pictures out."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxblt.outputs import check_output, whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
"""Endings of pictures."""


def check_reports(written: Mapping[str, Path | None], *, inputs: Iterable[Any], overwrite: bool) -> None:
    """Check that a command may write its files, and that their names say formats that can be written.

    Args:
      written: by option, the files; None for one that is not asked for.
      inputs: files and folders that the command reads; None for one that is not given.
      overwrite: whether files that are there may be replaced.

    Raises:
      ValueError, FileExistsError: as of `check_output`, or a name has another ending.
      ImportError: the package for a format is missing.
    """
    from jaxblt.answers.reports.tracks import check_track

    read = [path for path in inputs if path is not None]
    asked = {option: path for option, path in written.items() if path is not None}
    for option, path in asked.items():
        others = [other for name, other in asked.items() if name != option]
        check_output(option, path, inputs=[*read, *others], overwrite=overwrite)
    if "--track" in asked:
        check_track(asked["--track"])
    if "--picture" in asked:
        check_picture(asked["--picture"])


def check_picture(path: Path) -> None:
    """Check that the name of a picture says its format, and that pictures can be drawn."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--picture {path} must end in one of {', '.join(PICTURES)}: rename it")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{error}: pictures are drawn by matplotlib, pip install 'jaxblt[plot]'") from error


def open_sequences(file: Path, regions: Path | None, feature: str | None, *, as_genome: bool = False) -> Any:
    """Return what a command reads: a file's path, or its regions as records.

    Args:
      file: of sequences; FASTA if there are regions.
      regions: see `open_regions`.
      feature: see there.
      as_genome: open the file as FASTA without regions too, so that a track knows its records.
    """
    from jaxblt.data.sources import FastaSource, open_regions

    if regions is None and feature is not None:
        raise ValueError(f"--feature {feature} is of the lines of --regions: name a GFF or GTF file")
    if regions is not None:
        return open_regions(file, regions, feature=feature)
    return FastaSource(file) if as_genome else file


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a picture, whole or not at all."""
    with whole_file(path) as partial:
        figure.savefig(partial, format=path.suffix.lower()[1:], dpi=120)
