"""Regions of a genome from BED, GFF3 and GTF files, as intervals."""

import os
import re
from pathlib import Path

from jaxblt.data.sources.bed import BedInterval, BedSource, read_bed
from jaxblt.data.sources.fasta import FastaSource
from jaxblt.data.sources.files import expand_one
from jaxblt.data.sources.opening import is_compressed_name, name_of, read_lines

GFF = (".gff", ".gff3", ".gtf")
"""Endings of files whose coordinates are from 1 and include the last base."""
NAMES = ("ID", "Name", "transcript_id", "gene_id")
"""Attributes that name a feature; the first one that a line has counts."""
_ATTRIBUTE = re.compile(r'\s*([^\s=]+)(?:=|\s+)("[^"]*"|[^;]*)\s*(?:;|$)')


def open_regions(
    genome: str | os.PathLike, regions: str | os.PathLike, *, feature: str | None = None
) -> BedSource:
    """Open regions of a genome as documents, each named `record:start-stop` (from 0, half-open), then its own name.

    Args:
      genome: FASTA file.
      regions: BED, GFF3 or GTF file, by its ending; compressed or not.
      feature: of GFF and GTF, the third column of lines that count, such as "gene"; None for all lines.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: a line is bad, none is of the feature, or a region leaves its record.
    """
    source, intervals = FastaSource(genome), read_regions(regions, feature=feature)
    try:
        return BedSource(source, intervals, pad=False)
    except ValueError as error:
        raise ValueError(f"{os.fspath(regions)}: {error}") from error


def read_regions(path: str | os.PathLike, *, feature: str | None = None) -> list[BedInterval]:
    """Read the intervals of a BED, GFF3 or GTF file, see `open_regions`."""
    file = expand_one(path)
    if _ending(file) not in GFF:
        if feature is not None:
            raise ValueError(
                f"{name_of(file)}: feature = {feature!r} is a column of GFF and GTF, and this is BED: leave it out"
            )
        return read_bed(path)
    found, kinds = [], set()
    for n, line in enumerate(read_lines(file), start=1):
        if line.startswith("##FASTA"):
            break
        if line.strip() and not line.startswith("#"):
            kind, interval = _parse(line, f"{name_of(file)}:{n}")
            kinds.add(kind)
            if feature in (None, kind):
                found.append(interval)
    if not found:
        wanted = "line of nine columns" if feature is None else f"feature {feature!r}, only {sorted(kinds)}"
        raise ValueError(f"{name_of(file)}: there is no {wanted}")
    return found


def _ending(file: Path) -> str:
    name = Path(name_of(file))
    return (name.with_suffix("") if is_compressed_name(name) else name).suffix.lower()


def _parse(line: str, where: str) -> tuple[str, BedInterval]:
    columns = line.rstrip().split("\t")
    try:
        record, _, kind, first, last, _, strand = columns[:7]
        start, stop = int(first) - 1, int(last)
    except ValueError as error:
        raise ValueError(
            f"{where} is no line of GFF: {line!r:.80}; expected record, source, feature, start, end, score, strand "
            "with tabs between them"
        ) from error
    if not 0 <= start < stop:
        raise ValueError(f"{where}: {record}:{first}-{last} holds no base; GFF counts from 1, with its end")
    attributes = dict(_ATTRIBUTE.findall(columns[8])) if len(columns) > 8 else {}
    name = next((attributes[key].strip().strip('"') for key in NAMES if key in attributes), "")
    return kind, BedInterval(record, start, stop, name, strand if strand in ("+", "-") else ".")
