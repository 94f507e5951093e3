"""What a caller hands over as sequences, opened as documents with names."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxblt.data.config import DataConfig
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.sources import (
    ArrowSource,
    BytesSource,
    DocumentSource,
    FastaSource,
    JsonlSource,
    TextSource,
)
from jaxblt.data.sources.arrow import ARROW
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.labelled import FASTA, FASTQ, TABLES, ending
from jaxblt.data.task_data import RowsConfig, TaskDataConfig

Sequences = Sequence[bytes | str] | str | os.PathLike[str] | DocumentSource
"""A list of bytes or text, the path of a FASTA, JSON lines, Parquet, Arrow or text file, or documents."""


def open_records(sequences: Sequences, data: RowsConfig) -> DocumentSource:
    """Open the records of a path or of a list; documents that are open already are returned.

    A FASTA file (by its ending) has a record a header, JSON lines a record a line, Parquet and Arrow a record a row.
    Any other file is one record. A pipe has no ending: what begins with '>' is FASTA, and with '{' JSON lines.
    Case of FASTA bases follows the run's data: `soft_mask="upper"` raises lower-case bases, "keep" leaves them. In
    lists, text files and open documents every byte is taken as it is; N is a byte like any other. Text in a list is
    encoded as UTF-8.

    Args:
      sequences: see `Sequences`; records of a list are named "0", "1", ...
      data: of the run.

    Raises:
      FileNotFoundError: a path names no file.
      ValueError: there is no record, one is empty, or is neither bytes nor text; or a table for a run on labels.
    """
    source = _opened(sequences, data)
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
        return open_fasta(path, data) if kind in FASTA else _open_other(path, kind, data)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; a sequence itself goes into a list: [b'ACGT']") from error


def open_fasta(path: str | os.PathLike[str], data: RowsConfig) -> FastaSource:
    """Open a FASTA file in the case that the run was trained on."""
    return FastaSource(path, soft_mask="keep" if isinstance(data, TaskDataConfig) else data.soft_mask)


def _open_other(path: Path, kind: str, data: RowsConfig) -> DocumentSource:
    if kind in FASTQ:
        raise ValueError(
            f"'{path}' ends in {kind}, and its reads would be one record with their qualities: write it as FASTA, for "
            "example with seqtk seq -a"
        )
    if isinstance(data, LabelledDataConfig) and kind in (*TABLES, ".bed"):
        raise ValueError(
            f"'{path}' ends in {kind}, and a table would be read as one record: give its sequences as FASTA, JSON "
            "lines or a list"
        )
    if kind == ".jsonl":
        return JsonlSource(path, field=_text_field(data))
    if kind in ARROW:
        return ArrowSource(path, field=_text_field(data))
    return TextSource(path, raw=isinstance(data, DataConfig) and data.kind == "bytes")


def _text_field(data: RowsConfig) -> str:
    """Return the field of JSON lines, or the column of Arrow, that holds a record."""
    if isinstance(data, LabelledDataConfig):
        return data.sequence
    return data.field if isinstance(data, DataConfig) else "text"


def _as_bytes(i: int, item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if not isinstance(item, bytes):
        raise ValueError(f"sequence {i} must be bytes or text, got {item!r:.40}: make it bytes")
    return item
