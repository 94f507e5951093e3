"""A caller's sequences, opened as documents with names."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxblt.data.config import DataConfig
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.letters import letters_of
from jaxblt.data.sources import (
    ArrowSource,
    BedSource,
    BytesSource,
    DocumentSource,
    FastaSource,
    JsonlSource,
    TextSource,
)
from jaxblt.data.sources.arrow import ARROW
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import FASTA, FASTQ, GENBANK, TABLES, ending
from jaxblt.data.task_data import RowsConfig

MARKED = (*TABLES, *GENBANK, ".bed", ".vcf", ".gff", ".gff3", ".gtf", ".sam", ".maf")
"""Endings of tables and of marked-up sequences, in which names and numbers stand beside the letters of a record."""

Sequences = Sequence[bytes | str] | str | os.PathLike[str] | DocumentSource
"""A list of bytes or text, the path of a FASTA, JSON lines, Parquet, Arrow or text file, or documents."""


def open_records(sequences: Sequences, data: RowsConfig, *, as_trained: bool = True) -> DocumentSource:
    """Open the records of a path, of a list, or of documents that are open already.

    A FASTA file (by its ending) has a record a header, JSON lines a record a line, Parquet and Arrow a record a row.
    Any other file is one record. A pipe has no ending: what begins with '>' is FASTA, and with '{' JSON lines.
    Text in a list is encoded as UTF-8. Case follows the run's data, wherever records come from: `soft_mask="upper"`
    raises lower-case letters (see `jaxblt.data.letters`).

    Args:
      sequences: see `Sequences`; records of a list are named "0", "1", ...
      data: of the run.
      as_trained: False takes every byte as it is.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: there is no record, one is empty, or is neither bytes nor text.
      ValueError: a run on sequences or labels gets a table or another file of `MARKED`.
    """
    source = _opened(sequences, data)
    if as_trained:
        is_path = isinstance(sequences, str | os.PathLike)
        is_fasta = (
            ending(Path(sequences)) in FASTA if is_path else isinstance(source, BedSource | FastaSource)
        )
        source = letters_of(data, of_fasta=is_fasta).open(source)
    if not len(source):
        raise ValueError("no sequences were given: expected at least one record")
    empty = np.flatnonzero(np.asarray(source.lengths) == 0)
    if empty.size:
        name = source.names[int(empty[0])]
        raise ValueError(f"record {name!r} is empty (0 bytes), expected at least one byte: leave it out")
    return source


def _opened(sequences: Any, data: RowsConfig) -> DocumentSource:
    if isinstance(sequences, str | os.PathLike):
        return _open_file(Path(sequences), data)
    if isinstance(sequences, DocumentSource):
        return sequences
    if isinstance(sequences, bytes | bytearray) or not isinstance(sequences, Sequence):
        raise ValueError(
            f"sequences must be a list of bytes, a path or a DocumentSource, got {sequences!r:.40}: put it in a list"
        )
    return BytesSource([_as_bytes(i, item) for i, item in enumerate(sequences)])


def _open_file(path: Path, data: RowsConfig) -> DocumentSource:
    try:
        kind = ending(path) or ending(expand(path)[0])
        return FastaSource(path) if kind in FASTA else _open_other(path, kind, data)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; a sequence itself goes into a list: [b'ACGT']") from error


def _open_other(path: Path, kind: str, data: RowsConfig) -> DocumentSource:
    if kind in FASTQ:
        raise ValueError(
            f"'{path}' ends in {kind}, and its reads would be one record with their qualities: write it as FASTA, for "
            "example with seqtk seq -a"
        )
    if kind in MARKED and _reads_letters(data):
        raise ValueError(
            f"'{path}' ends in {kind}, and would be read as one record, its names and numbers too: give its sequences "
            "as FASTA, JSON lines or a list"
        )
    if kind == ".jsonl":
        return JsonlSource(path, field=_text_field(data))
    if kind in ARROW:
        return ArrowSource(path, field=_text_field(data))
    return TextSource(path, raw=isinstance(data, DataConfig) and data.kind == "bytes")


def _reads_letters(data: RowsConfig) -> bool:
    """Return whether records are sequences: of a run on labels, or trained on FASTA and nothing else."""
    return isinstance(data, LabelledDataConfig) or getattr(data, "sample_or_kind", None) == "fasta"


def _text_field(data: RowsConfig) -> str:
    """Return the field of JSON lines, or the column of Arrow, that holds a record."""
    if isinstance(data, LabelledDataConfig):
        return data.sequence
    return data.field if isinstance(data, DataConfig) else "text"


def _as_bytes(i: int, item: Any) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"sequence {i} holds a lone surrogate at character {error.start}, which has no bytes: make it bytes"
            ) from error
    if not isinstance(item, bytes):
        raise ValueError(f"sequence {i} must be bytes or text, got {item!r:.40}: make it bytes")
    return item
