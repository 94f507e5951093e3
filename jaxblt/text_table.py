"""Small tables for a terminal or a Markdown page."""

from collections.abc import Sequence
from typing import Literal

Cell = str | int | float | None


def format_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    style: Literal["text", "markdown"] = "text",
    digits: int = 3,
) -> str:
    """Write rows under headers, columns padded to one width, numbers to the right.

    There is no newline at the end. Floats get `digits` decimals, integers thousands separators, None a dash.

    Raises:
      ValueError: a row has not as many cells as there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row of {len(row)} cells under {len(headers)} headers: {list(row)}")
    texts = [list(headers), *[[_text(cell, digits) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in texts) for i in range(len(headers))]
    numeric = [bool(rows) and all(not isinstance(row[i], str) for row in rows) for i in range(len(headers))]
    lines = [_line(line, widths, numeric, style) for line in texts]
    return "\n".join([lines[0], _rule(widths, numeric, style), *lines[1:]])


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool | str):
        return str(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.{digits}f}"


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], style: str) -> str:
    padded = [c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)]
    return f"| {' | '.join(padded)} |" if style == "markdown" else "  ".join(padded).rstrip()


def _rule(widths: Sequence[int], numeric: Sequence[bool], style: str) -> str:
    if style == "text":
        return "  ".join("-" * width for width in widths)
    return (
        "|"
        + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True))
        + "|"
    )
