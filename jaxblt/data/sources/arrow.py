"""Columns of Parquet and Arrow files, and of folders that `datasets` saved, as documents or rows with labels."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxblt.data.sources.base import check_range
from jaxblt.data.sources.files import expand
from jaxblt.data.sources.formats import HEAD, format_of
from jaxblt.data.sources.opening import check_expansion, empty, name_of

ARROW = (".parquet", ".arrow", ".feather")
"""Names of Parquet and Arrow files end so."""

_ROWS = 1024
"""Rows of a Parquet file that are decoded at once."""
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class ArrowSource:
    """Each row of a column of text, bytes or lists of uint8 is one document; text is UTF-8.

    Arrow files and streams, which `save_to_disk` of `datasets` writes, are mapped into memory and read where they lie.
    Parquet, and Arrow that was written with compression, is held in memory. Needs pyarrow (extra `arrow`).

    Args:
      paths: files, globs and URLs, and folders of saved datasets.
      field: the column.

    Raises:
      FileNotFoundError: a path or glob names no file.
      ImportError: pyarrow is not installed.
      ValueError: a file is empty, damaged, or neither Parquet nor Arrow.
      ValueError: it has no row, no such column, or one of another type.
      ValueError: a row holds nothing.
    """

    def __init__(self, paths: str | os.PathLike | Iterable[str | os.PathLike], *, field: str = "text"):
        self._field = field
        self._paths = expand(paths)
        self._chunks: list[Any] = []
        self.names: list[str] = []
        for path in self._paths:
            chunks = self._read(path)
            rows = range(1, sum(map(len, chunks)) + 1)
            if not rows:
                raise ValueError(f"{name_of(path)!r} holds no row: remove it from the paths")
            self.names += [f"{name_of(path)}:{row}" for row in rows]
            self._chunks += chunks
        self.lengths = np.concatenate([_lengths(chunk) for chunk in self._chunks])
        self._firsts = np.cumsum([0, *map(len, self._chunks)])

    def _read(self, path: Path) -> list[Any]:
        return [binary for binary, _ in _columns(path, self._field, ())]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the columns out of what another process gets: it maps the files anew."""
        return {**self.__dict__, "_chunks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._chunks = [chunk for path in self._paths for chunk in self._read(path)]

    def __len__(self) -> int:
        return len(self.names)

    def read(self, i: int, start: int, stop: int) -> bytes:
        check_range(self, i, start, stop)
        chunk = int(np.searchsorted(self._firsts, i, side="right")) - 1
        value = self._chunks[chunk][i - int(self._firsts[chunk])]
        return bytes(memoryview(value.as_buffer())[start:stop])


def read_rows(
    path: Path, field: str, others: Sequence[str], *, extra: str
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Return the bytes of a column and the values of others, row by row.

    Args:
      path: of the file.
      field: the column of bytes, see `ArrowSource`.
      others: columns that the file must have.
      extra: a column that it may have.

    Raises:
      ImportError: pyarrow is not installed.
      ValueError: as of `ArrowSource`.
    """
    for binary, values in _columns(path, field, others, extra):
        for value, row in zip(binary, values.to_pylist(), strict=True):
            yield bytes(value.as_buffer()), row


def _columns(path: Path, field: str, others: Sequence[str], extra: str = "") -> Iterator[tuple[Any, Any]]:
    """Return a column as an array of bytes and a batch of the others, batch by batch."""
    pa, row, held = _pyarrow(), 0, 0
    with _told_as_damaged(pa, path):
        schema, batches = _opened(pa, path)
        for name in (field, *others):
            if schema.names.count(name) != 1:
                raise ValueError(
                    f"{name_of(path)!r} has {schema.names.count(name)} columns {name!r}, it has {schema.names}: name "
                    "the right one"
                )
        beside = [name for name in schema.names if name in (*others, extra)]
        for batch in batches(list(dict.fromkeys([field, *beside]))):
            binary = _as_binary(pa, batch.column(field))
            if binary is None:
                raise ValueError(
                    f"{name_of(path)!r}: column {field!r} holds {schema.field(field).type}, expected text, bytes or "
                    "lists of uint8"
                )
            if binary.null_count:
                row += 1 + binary.is_null().to_pylist().index(True)
                raise ValueError(
                    f"{name_of(path)}:{row}: column {field!r} holds nothing (null): leave the row out"
                )
            row, held = row + len(batch), held + binary.nbytes
            check_expansion(path, held)
            yield binary, batch.select(beside)


@contextlib.contextmanager
def _told_as_damaged(pa: Any, path: Path) -> Iterator[None]:
    """Name the file in what pyarrow says of damage."""
    try:
        yield
    except (pa.ArrowException, UnicodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = " ".join(str(error).split())
        raise ValueError(f"{name_of(path)!r} is damaged ({said:.200}): copy it again") from error


def _opened(pa: Any, path: Path) -> tuple[Any, Any]:
    """Return a file's schema, and a function that reads the named columns in batches."""
    with open(path, "rb") as file:
        head = file.read(HEAD)
    if not head:
        raise empty(path)
    kind = format_of(head)
    name = "" if kind is None else kind.name
    if name == "a Parquet file":
        file = pa.parquet.ParquetFile(path, memory_map=True)
        return file.schema_arrow, lambda columns: file.iter_batches(_ROWS, columns=columns)
    mapped = pa.memory_map(str(path))
    if name == "an Arrow file":
        reader = pa.ipc.open_file(mapped)
        return reader.schema, lambda columns: (
            reader.get_batch(i).select(columns) for i in range(reader.num_record_batches)
        )
    if name == "an Arrow stream":
        mapped.seek(max(mapped.size() - len(_STREAM_END), 0))
        if mapped.read() != _STREAM_END:
            raise ValueError(
                f"{name_of(path)!r} is truncated: an Arrow stream without its end; copy it again"
            )
        mapped.seek(0)
        reader = pa.ipc.open_stream(mapped)
        return reader.schema, lambda columns: (batch.select(columns) for batch in reader)
    raise ValueError(
        f"{name_of(path)!r} is neither Parquet nor Arrow: name such a file, or read it as another kind"
    )


def _as_binary(pa: Any, array: Any) -> Any | None:
    """Convert an array of text, bytes or uint8 lists to bytes; None for other types.

    It mostly makes no copy.
    """
    array.validate(full=True)  # or bytes outside of a damaged file would be read
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind, types = array.type, pa.types
    if types.is_binary(kind) or types.is_large_binary(kind):
        return array
    if types.is_string(kind):
        return array.cast(pa.binary())
    if types.is_large_string(kind) or types.is_string_view(kind) or types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not lists or kind.value_type != pa.uint8():
        return None
    lengths = pa.compute.list_value_length(array).fill_null(0).to_numpy()
    buffers = [np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), array.flatten().to_numpy()]
    held = pa.Array.from_buffers(pa.large_binary(), len(array), [None, *map(pa.py_buffer, buffers)])
    return pa.compute.if_else(array.is_valid(), held, None) if array.null_count else held


def _lengths(binary: Any) -> np.ndarray:
    """Return Int64[N], bytes in each value."""
    return _pyarrow().compute.binary_length(binary).to_numpy().astype(np.int64)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet and Arrow are read by pyarrow: pip install 'jaxblt[arrow]'") from error
    return pyarrow
