"""Tables as files of tab-separated values, written whole or not at all."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

from jaxblt.outputs import whole_file


def write_tsv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a line of column names, then a line a row.

    Floats have nine digits. Tabs and line ends in text become blanks. Missing folders are made.
    """
    with whole_file(path) as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        for row in itertools.chain([header], rows):
            file.write("\t".join(map(_cell, row)) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.splitlines()).replace("\t", " ")
    return f"{value:.9g}" if isinstance(value, float) else str(value)
