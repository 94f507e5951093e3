"""Sets of labelled intervals in the form of Genomic Benchmarks, cut out of a genome that the user has."""

import csv
import os
from pathlib import Path

import numpy as np

from jaxblt.data.sources.base import DocumentSource, read_document
from jaxblt.data.sources.bed import BedInterval, BedSource
from jaxblt.data.sources.opening import read_lines
from jaxblt.outputs import whole_file

COLUMNS = ("region", "start", "end", "strand")
STRANDS = ("+", "-", ".")
VALIDATION = 0.1
"""Share of the training intervals that are for validation."""
PREFIX = "chr"
"""The beginning of names of chromosomes, which genomes of Ensembl lack."""


def read_interval_set(folder: str | os.PathLike[str], known: list[str]) -> list[tuple[str, BedInterval]]:
    """Return the part of each interval, and the interval with its class as its name.

    The folder holds `train/CLASS.csv` and `test/CLASS.csv`, plain or compressed, with columns region, start, end and
    strand. Column start is 0-based, end is behind the last base (Gresova et al. 2023, BMC Genomic Data 24:25).

    Args:
      folder: of the set.
      known: names of the genome's records; "chr1" is also found as "1", and the other way round.

    Raises:
      ValueError: there is no such file, or a row is no interval of the genome.
    """
    names = {name: record for record in known for name in (PREFIX + record, record.removeprefix(PREFIX))}
    names |= {record: record for record in known}
    found = []
    for part in ("train", "test"):
        for file in sorted(Path(folder, part).glob("*.csv*")):
            label = file.name.partition(".csv")[0]
            for number, row in enumerate(csv.DictReader(read_lines(file)), start=2):
                found.append((part, _interval(row, label, names, f"{file}:{number}")))
    if missing := [part for part in ("train", "test") if not any(of == part for of, _ in found)]:
        raise ValueError(
            f"{folder} has no intervals in {missing[0]}/: expected {missing[0]}/CLASS.csv with columns region, start, "
            "end, strand, as Genomic Benchmarks has them"
        )
    return found


def _interval(row: dict[str, str], label: str, names: dict[str, str], where: str) -> BedInterval:
    try:
        region, start, stop, strand = (row[column] for column in COLUMNS)
        interval = BedInterval(names.get(region, ""), int(start), int(stop), label, strand)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where} is no row of {', '.join(COLUMNS)}: {row}") from error
    if strand not in STRANDS or not 0 <= interval.start < interval.stop:
        raise ValueError(
            f"{where}: expected 0 <= start < end and a strand of {', '.join(STRANDS)}; got {start}, {stop}, {strand!r}"
        )
    if region not in names:
        known = ", ".join(list(dict.fromkeys(names.values()))[:3])
        raise ValueError(
            f"{where}: the genome has no record {region!r}, but {known}, ...: take the genome that the set was made of"
        )
    return interval


def write_interval_set(
    folder: str | os.PathLike[str], genome: DocumentSource, out: str | os.PathLike[str], *, seed: int = 0
) -> dict[str, int]:
    """Write the set as a table of id, sequence, label and split, and return how many records each part has.

    `jaxblt finetune` reads it with `--data.split column`. A tenth of the training intervals are drawn for validation.

    Args:
      folder, genome: see `read_interval_set`; the genome is FASTA.
      out: CSV file.
      seed: of the draw.

    Raises:
      ValueError: see `read_interval_set`; or an interval leaves its record.
    """
    found = read_interval_set(folder, list(genome.names))
    parts = np.array([part for part, _ in found], dtype="U10")
    train = np.random.default_rng(seed).permutation(np.flatnonzero(parts == "train"))
    parts[train[: round(VALIDATION * len(train))]] = "validation"
    source = BedSource(genome, [interval for _, interval in found], pad=False)
    with whole_file(out) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "sequence", "label", "split"))
        for i, (part, (_, one)) in enumerate(zip(parts.tolist(), found, strict=True)):
            name = f"{one.record}:{one.start}-{one.stop}{one.strand}"
            writer.writerow((name, read_document(source, i).decode(), one.name, part))
    return {part: int((parts == part).sum()) for part in ("train", "validation", "test")}
