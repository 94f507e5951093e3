"""Notebooks as pages: their text, their code and the outputs that they were committed with."""

import json
from pathlib import Path
from typing import Any


def as_markdown(path: Path) -> str:
    """The cells of a notebook and their outputs, as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [_fenced(source, "python"), *(_shown(output) for output in cell["outputs"])]


def _shown(output: dict[str, Any]) -> str:
    """An output: its picture if it has one, else its text."""
    if output["output_type"] == "stream":
        return _fenced("".join(output["text"]))
    data = output["data"]
    if "image/png" in data:
        return f"![the cell's picture](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return _fenced("".join(data["text/plain"]))


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"
