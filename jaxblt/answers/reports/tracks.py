"""Values of bases as tracks that genome browsers show: bedGraph and bigWig."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxblt.data.sources import BedInterval, BedSource, DocumentSource
from jaxblt.outputs import whole_file

BIGWIG, BEDGRAPH = (".bw", ".bigwig"), (".bedgraph", ".bg")
"""Endings of files of each format, in any case of letters."""
INSTALL = "pip install 'jaxblt[tracks]'"


class Track(NamedTuple):
    """Values of bases of one record: positions Int64[N] from 0, rising, and their values Float64[N]."""

    record: str
    positions: np.ndarray
    values: np.ndarray


def check_track(path: str | os.PathLike[str]) -> None:
    """Check that the name of a track says its format, and that the format can be written.

    Raises:
      ValueError: it has another ending.
      ImportError: bigWig is asked for without its package.
    """
    ending = Path(path).suffix.lower()
    if ending not in (*BIGWIG, *BEDGRAPH):
        raise ValueError(
            f"track {os.fspath(path)!r} must end in one of {', '.join((*BEDGRAPH, *BIGWIG))}: rename it"
        )
    if ending in BIGWIG:
        try:
            import pybigtools  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{error}: bigWig is written by pybigtools, {INSTALL}") from error


def write_track(path: str | os.PathLike[str], source: DocumentSource, values: Sequence[np.ndarray]) -> None:
    """Write values of bases as bedGraph or bigWig, by the ending of the path.

    A base in several regions has their mean. NaN is left out. Values of regions on strand "-" are turned round.

    Args:
      path: of the file.
      source: records that the values are of: regions of a genome (`open_regions`), or whole records.
      values: for each record Float[L], in the order in which it is read.

    Raises:
      ValueError: the ending is of no format; a record has more bytes than values, or fewer.
      ImportError: see `check_track`.
    """
    check_track(path)
    tracks = tracks_of(source, values)
    with whole_file(path) as partial:
        if Path(path).suffix.lower() in BEDGRAPH:
            with open(partial, "w", encoding="utf-8", newline="\n") as file:
                file.writelines(f"{r}\t{a}\t{b}\t{v:.9g}\n" for r, a, b, v in runs_of(tracks))
        else:
            import pybigtools

            # Give the writer a name that ends as its format does: it refuses others
            written = partial.with_name(partial.name + ".bw")
            pybigtools.open(str(written), "w").write(record_sizes(source), runs_of(tracks))
            os.replace(written, partial)


def tracks_of(source: DocumentSource, values: Sequence[np.ndarray]) -> list[Track]:
    """Return the values of all bases that have one, by record, sorted by name."""
    pieces: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for x, own in zip(intervals_of(source), values, strict=True):
        if len(own) != x.stop - x.start:
            raise ValueError(
                f"{x.record}:{x.start}-{x.stop} has {x.stop - x.start} bases and {len(own)} values: give one a base"
            )
        turned = np.asarray(own, np.float64)[:: -1 if x.strand == "-" else 1]
        pieces.setdefault(x.record, []).append((np.arange(x.start, x.stop), turned))
    return [
        _mean(record, *map(np.concatenate, zip(*pieces[record], strict=True))) for record in sorted(pieces)
    ]


def intervals_of(source: DocumentSource) -> list[BedInterval]:
    """Return where each document of a source lies: its region, or a whole record."""
    if isinstance(source, BedSource):
        return source.intervals
    lengths = np.asarray(source.lengths).tolist()
    return [BedInterval(name, 0, length) for name, length in zip(source.names, lengths, strict=True)]


def record_sizes(source: DocumentSource) -> dict[str, int]:
    """Return the bases of each record that a source's documents lie in."""
    whole = source.genome if isinstance(source, BedSource) else source
    return dict(zip(whole.names, np.asarray(whole.lengths).tolist(), strict=True))


def _mean(record: str, positions: np.ndarray, values: np.ndarray) -> Track:
    kept = np.isfinite(values)
    places, which, counts = np.unique(positions[kept], return_inverse=True, return_counts=True)
    return Track(record, places, np.bincount(which, values[kept], len(places)) / counts)


def runs_of(tracks: Sequence[Track]) -> Iterator[tuple[str, int, int, float]]:
    """Yield record, start, stop and value of runs of neighbours with one value, from 0 and half-open."""
    for record, positions, values in tracks:
        new = np.ones(len(positions), bool)
        new[1:] = (np.diff(positions) != 1) | (np.diff(values) != 0)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(positions)) - 1
        for a, b, value in zip(positions[first], positions[last] + 1, values[first], strict=True):
            yield record, int(a), int(b), float(value)
