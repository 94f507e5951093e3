"""The page's template: prose with figures in it, and tables as data.

A table is one or more blocks of columns, "head = path|format" with semicolons between them, below a line such as

    ```rows recall_16 recall_seeds*; items = runs; where = pairs:16; by = mixer; together = file; use = recall

It names files, older ones first; `items`, the path of a row; `where`, a path and the value that rows have there; `by`,
paths that name a row; and `together`. Of rows of one name the last file's stands. With `together` they are one row, of
the last `file` or of `all`. A block "```columns NAME" holds columns that `use` puts into a table.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from experiments.benchmark.results.files import Folder, gpu, runs
from experiments.benchmark.results.numbers import write, write_mean
from experiments.benchmark.results.paths import Row, look_up, rows

Columns = dict[str, tuple[str, str]]
"""Path and format by head."""


def render(template: str, folder: Folder) -> str:
    """Return a template with its figures and tables filled in.

    Raises:
      ValueError: a table shows a name that its section does not explain.
    """
    named: dict[str, Columns] = {}
    parts = filter(None, re.split(r"^(?=## )", template, flags=re.M))
    return "\n".join(_section(part, folder, named) for part in parts)


def _section(text: str, folder: Folder, named: dict[str, Columns]) -> str:
    blocks: list[tuple[dict[str, str], Columns]] = []
    for kind, head, body in re.findall(r"^```(rows|columns) (.*?)\n(.*?)```$", text, flags=re.M | re.S):
        columns = read_columns(body.splitlines())
        if kind == "columns":
            named[head] = columns
        else:
            files, *told = head.split("; ")
            about = {"files": files} | dict(each.split(" = ") for each in told)
            blocks.append((about, named.get(about.get("use", ""), {}) | columns))
    told = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    prose = [fill(figures(each, folder)) for each in told.split("\n\n") if each.strip()]
    return "\n\n".join(prose + [table(blocks, folder, "\n".join(prose))] * bool(blocks)) + "\n"


def figures(text: str, folder: Folder) -> str:
    """Return a text with its figures: "{{file.path|format}}"."""

    def figure(match: re.Match[str]) -> str:
        path, _, form = match[1].partition("|")
        return write(look_up(folder, path), form)

    return re.sub(r"\{\{(.*?)\}\}", figure, text)


def read_columns(lines: Iterable[str]) -> Columns:
    """Return the columns of some lines."""
    found = (column.partition(" = ") for line in lines for column in line.split("; "))
    cut = {head.strip(): path.strip().partition("|") for head, _, path in found if path}
    return {head: (path, form) for head, (path, _, form) in cut.items()}


def table(blocks: Sequence[tuple[dict[str, str], Columns]], folder: Folder, legend: str) -> str:
    """Return the table of some blocks, below the heads of all their columns."""
    heads = list(dict.fromkeys(head for _, columns in blocks for head in columns))
    lines = [
        [cell(alike, *columns[head], told, legend) if head in columns else "" for head in heads]
        for told, columns in blocks
        for alike in select(told, folder)
    ]
    return markdown(heads, lines)


def select(told: Mapping[str, str], folder: Folder) -> list[list[Row]]:
    """Return the rows of a block, each as the items that it is made of."""
    names = [name for pattern in told["files"].split() for name in folder if fnmatchcase(name, pattern)]
    key, _, value = told.get("where", "").partition(":")
    chosen = [
        row
        for name in dict.fromkeys(names)
        for run in runs(folder[name])
        for row in rows(
            {"folder": folder, "file": name, "gpu": gpu(folder[name]), **run}, told.get("items", "")
        )
        if not key or ((found := look_up(row, key)) is not None and value in ("", str(found)))
    ]
    by = told.get("by", "").split()
    alike: dict[Any, list[Row]] = {}
    for i, row in enumerate(chosen):
        alike.setdefault(str([look_up(row, path) for path in by]) if by else i, []).append(row)
    if told.get("together") == "all":
        return list(alike.values())
    newest = [[row for row in each if row["file"] == each[-1]["file"]] for each in alike.values()]
    return newest if told.get("together") == "file" else [each[-1:] for each in newest]


def cell(alike: Sequence[Row], path: str, form: str, told: Mapping[str, str], legend: str) -> str:
    """Return a cell: of several items their number, their mean, or what the first of them has that has it.

    Raises:
      ValueError: it is a name that the legend lacks.
    """
    values = [value for row in alike if (value := look_up(row, path)) is not None]
    if form == "count":
        return str(len(alike))
    if form.startswith("mean "):
        return write_mean(values, form.removeprefix("mean "))
    value = values[0] if values else None
    for name in value if isinstance(value, list) else [value]:
        if form == "name" and name is not None and f"`{name}`" not in legend:
            raise ValueError(f"the table of {told['files']} shows {name!r}: explain it above the table")
    return write(value, form)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table; every row has as many cells as the head."""
    lines = [head, ["---"] * len(head), *lines]
    if odd := [line for line in lines if len(line) != len(head)]:
        raise ValueError(f"a row has {len(odd[0])} cells and the head {len(head)}: {odd[0]}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(text: str) -> str:
    """Return a paragraph in lines of 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
