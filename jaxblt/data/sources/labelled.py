"""Records with labels: tables, JSON lines, Parquet and Arrow, FASTA with a table of labels, BED over a genome.

A label is the text that the file holds; `jaxblt.data.label_tasks` turns it into a class or a number. A record may have
several. A bad row is an error that names its file and line. Records lie in memory.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxblt.data.sources.arrow import ARROW, read_rows
from jaxblt.data.sources.base import DocumentSource
from jaxblt.data.sources.bed import BedSource, bed_lines
from jaxblt.data.sources.fasta_text import parse_fasta, unify_lines
from jaxblt.data.sources.files import expand_one
from jaxblt.data.sources.jsonl import field_bytes
from jaxblt.data.sources.opening import is_compressed_name, read_all
from jaxblt.data.sources.tables import TABLES, read_table

FASTA = (".fa", ".fasta", ".fna", ".ffn", ".faa", ".frn", ".fas", ".fsa")
"""Names of FASTA files end so, before a `.gz` or the like."""
FASTQ = (".fastq", ".fq")
"""Names of FASTQ files end so."""
GENBANK = (".gb", ".gbk", ".gbff", ".genbank", ".embl")
"""Names of files of GenBank and EMBL end so."""


class LabelledRecord(NamedTuple):
    """A sequence with its labels.

    Attributes:
      name: of the record.
      sequence: its bytes, at least one.
      labels: as the file holds them; "" for an empty cell.
      part: what the file says of its split; None where it says nothing.
      difficulty: what the file says of it; None where it says nothing.
      place: "file:line" of the row that holds the labels, for errors.
    """

    name: str
    sequence: bytes
    labels: tuple[str, ...]
    part: str | None
    difficulty: str | None
    place: str

    @property
    def label(self) -> str:
        """The first label, the only one unless there are several tasks."""
        return self.labels[0]


@dataclass(frozen=True)
class Columns:
    """The columns of a table, or the fields of JSON lines.

    Attributes:
      sequence: of the sequence.
      labels: of the labels.
      name: of the record's name; a record of a file without it is called "file:line".
      part: of the split, or None if the file does not say.
      difficulty: of a number that is larger for harder records, or None if it is not asked for.
      optional: cells of labels may be empty, and fields may be missing or null.
    """

    sequence: str
    labels: tuple[str, ...]
    name: str
    part: str | None
    difficulty: str | None = None
    optional: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a table must have beside sequence and name."""
        return (*self.labels, *(name for name in (self.part, self.difficulty) if name is not None))


def ending(path: Path) -> str:
    """Return how a file's name ends, in lower case, before a `.gz` or the like."""
    return (path.with_suffix("") if is_compressed_name(path) else path).suffix.lower()


def read_labelled(
    path: Path, columns: Columns, *, labels: str | None, genome: DocumentSource | None
) -> list[LabelledRecord]:
    """Read the records of a file, known by its ending: a table, JSON lines, BED or FASTA.

    Endings are .csv, .tsv, .jsonl, .bed, those of `ARROW` and those of `FASTA`.

    Args:
      path: of the file.
      columns: what its columns or fields are called.
      labels: table of the labels of FASTA records.
      genome: FASTA records that BED intervals are parts of.

    Raises:
      ValueError: the ending says nothing, a row is bad, or labels or genome are missing or not asked for.
    """
    kind = ending(path)
    if kind in (*TABLES, ".jsonl", *ARROW):
        _check_different(path, columns)
        read = _from_table if kind in TABLES else _from_jsonl if kind == ".jsonl" else _from_arrow
        found = list(read(path, columns))
    elif kind == ".bed":
        found = _from_bed(path, columns, genome)
    elif kind in FASTA:
        found = _from_fasta(path, columns, labels)
    else:
        known = ", ".join([*TABLES, ".jsonl", *ARROW, ".bed", *FASTA])
        raise ValueError(f"'{path}' ends in none of {known}: labelled records are known by the file's ending")
    for record in found:
        if not record.sequence:
            raise ValueError(f"{record.place}: record {record.name!r} has an empty sequence: leave it out")
        if not columns.optional and not record.label:
            raise ValueError(
                f"{record.place}: record {record.name!r} has no label: give it one, or leave it out"
            )
    return found


def _check_different(path: Path, columns: Columns) -> None:
    """Raise ValueError for one column in two roles: the label would be copied, not learned."""
    roles = {columns.sequence: "the sequences"}
    for name, role in [*((name, "a label") for name in columns.labels), (columns.part, "the split")]:
        if name is not None and (other := roles.setdefault(name, role)) != role:
            raise ValueError(f"'{path}': column {name!r} cannot be {other} and {role}: name another column")


def _check_once(header: list[str], columns: Iterable[str], place: str) -> None:
    """Raise ValueError for a column that is there twice: the last one would count."""
    for column in columns:
        if header.count(column) > 1:
            raise ValueError(
                f"{place} has {header.count(column)} columns {column!r}: leave one, or rename it"
            )


def _option(columns: Columns, column: str) -> str:
    """Return how a caller names another column of sequences or of the one label."""
    field = "sequence" if column == columns.sequence else "label" if columns.labels == (column,) else None
    return f" (--data.{field} COLUMN)" if field else ""


def _from_table(path: Path, columns: Columns) -> Iterator[LabelledRecord]:
    rows = read_table(path, TABLES[ending(path)])
    line, header = next(rows)
    for column in (columns.sequence, *columns.needed):
        if column not in header:
            raise ValueError(
                f"{path}:{line} has no column {column!r}, it has {header}: name the right one"
                f"{_option(columns, column)}, with {'tabs' if TABLES[ending(path)] != ',' else 'commas'} between cells"
            )
    _check_once(header, (columns.sequence, columns.name, *columns.needed), f"{path}:{line}")
    for line, cells in rows:
        row = _cells(header, cells, f"{path}:{line}")
        yield _record(row, row[columns.sequence].encode(), columns, f"{path}:{line}")


def _cells(header: list[str], cells: list[str], place: str) -> dict[str, str]:
    if len(cells) != len(header):
        raise ValueError(
            f"{place} has {len(cells)} cells, expected {len(header)}: {', '.join(header)}; cells stand between commas "
            "in .csv and between tabs in .tsv, and one that holds such a mark needs quotes"
        )
    return dict(zip(header, cells, strict=True))


def _record(row: Mapping[str, str], sequence: bytes, columns: Columns, place: str) -> LabelledRecord:
    part = None if columns.part is None else row[columns.part]
    difficulty = None if columns.difficulty is None else row[columns.difficulty]
    labels = tuple(row.get(name, "") for name in columns.labels)
    return LabelledRecord(row.get(columns.name) or place, sequence, labels, part, difficulty, place)


def _from_jsonl(path: Path, columns: Columns) -> Iterator[LabelledRecord]:
    for number, line in enumerate(io.BytesIO(read_all(path)), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        sequence = field_bytes(line, columns.sequence, place)
        yield _from_fields(json.loads(line), sequence, columns, place)


def _from_arrow(path: Path, columns: Columns) -> Iterator[LabelledRecord]:
    rows = read_rows(path, columns.sequence, columns.needed, extra=columns.name)
    for number, (sequence, fields) in enumerate(rows, start=1):
        yield _from_fields(fields, sequence, columns, f"{path}:{number}")


def _from_fields(fields: dict[str, Any], sequence: bytes, columns: Columns, place: str) -> LabelledRecord:
    for name in columns.needed:
        if columns.optional and name in columns.labels and fields.get(name) is None:
            continue
        if not isinstance(fields.get(name), str | int | float):
            raise ValueError(
                f"{place}: field {name!r} holds {fields.get(name)!r:.40}, expected text or a number; its fields "
                f"are {sorted(fields)}"
            )
    told = {key: str(value) for key, value in fields.items() if value is not None}
    return _record(told, sequence, columns, place)


def _from_bed(path: Path, columns: Columns, genome: DocumentSource | None) -> list[LabelledRecord]:
    """Read intervals whose fourth column is their class; outside a record of the genome is N."""
    if columns.optional or columns.difficulty is not None:
        named = (*columns.labels, *filter(None, (columns.difficulty,)))
        raise ValueError(
            f"'{path}' has one label an interval and no column {', '.join(map(repr, named))}: put the sequences into a "
            "table"
        )
    if genome is None:
        raise ValueError(f"'{path}' holds intervals of a genome: set `genome` to its FASTA file")
    lines = bed_lines(path)
    known = set(genome.names)
    for number, interval in lines:
        if interval.record not in known:
            raise ValueError(
                f"{path}:{number}: the genome has no record {interval.record!r}: check the names"
            )
    source = BedSource(genome, [interval for _, interval in lines])
    return [
        LabelledRecord(
            f"{interval.record}:{interval.start}-{interval.stop}",
            source.read(i, 0, int(source.lengths[i])),
            (interval.name,),
            None,
            None,
            f"{path}:{number}",
        )
        for i, (number, interval) in enumerate(lines)
    ]


def _from_fasta(path: Path, columns: Columns, labels: str | None) -> list[LabelledRecord]:
    if labels is None:
        raise ValueError(f"'{path}' holds no labels: set `labels` to a .tsv or .csv table of id and label")
    data = unify_lines(read_all(path))
    lines = [n for n, line in enumerate(data.split(b"\n"), start=1) if line.startswith(b">")]
    records = parse_fasta(data, str(path))
    given = read_label_table(labels, columns)
    found = []
    for line, (name, sequence) in zip(lines, records, strict=True):
        if name not in given:
            raise ValueError(
                f"{path}:{line}: record {name!r} has no label in '{labels}': add a row, or leave it out"
            )
        record = given[name]._replace(sequence=sequence)
        # Name an empty sequence where it stands, anything else where its label does
        found.append(record if sequence else record._replace(place=f"{path}:{line}"))
    return found


def read_label_table(path: str, columns: Columns) -> dict[str, LabelledRecord]:
    """Read what a table of ids and labels says of each id: records without their sequences.

    A first row that holds the columns' names says which is which. Without one there are two columns: id, label. Labels
    of several tasks need one.

    Raises:
      ValueError: an id stands twice, a row lacks a cell, or a column is missing.
    """
    file = expand_one(path)
    if ending(file) not in TABLES:
        raise ValueError(f"'{file}' must end in .tsv or .csv: labels are a table of id and label")
    rows = list(read_table(file, TABLES[ending(file)]))
    header = [columns.name, columns.labels[0]]
    if columns.optional or set(header) <= set(rows[0][1]):
        header = rows.pop(0)[1]
    for column in (columns.name, *columns.needed):
        if column not in header:
            raise ValueError(
                f"'{file}' has no column {column!r}, it has {header}: write its names in the first row"
            )
    _check_once(header, (columns.name, *columns.needed), f"'{file}'")
    found: dict[str, LabelledRecord] = {}
    for line, cells in rows:
        place = f"{file}:{line}"
        record = _record(_cells(header, cells, place), b"", columns, place)
        if record.name in found:
            raise ValueError(
                f"{place}: id {record.name!r} has a label already, in {found[record.name].place}: keep one of the two "
                "rows, or rename one id and its record"
            )
        found[record.name] = record
    return found
