"""Tables as files of tab-separated values, written whole or not at all."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxblt.remote import refuse_remote


def write_tsv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A line of column names, then a line a row.

    Floats have nine digits. Tabs and line ends in text become blanks. Missing folders are made.
    """
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for row in itertools.chain([header], rows):
            file.write("\t".join(map(_cell, row)) + "\n")


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` once the block has ended without an error."""
    refuse_remote("out", path)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.splitlines()).replace("\t", " ")
    return f"{value:.9g}" if isinstance(value, float) else str(value)
