"""Notebooks as pages: their text, their code and the outputs that they were committed with."""

import base64
import json
from pathlib import Path
from typing import Any


def as_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's cells and outputs as Markdown, and its pictures by file name."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    pictures: dict[str, bytes] = {}
    parts = [part for cell in cells for part in _parts(cell, path.stem, pictures)]
    return "\n\n".join(parts) + "\n", pictures


def _parts(cell: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [_fenced(source, "python"), *(_shown(output, stem, pictures) for output in cell["outputs"])]


def _shown(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> str:
    """Return an output's picture if it has one, else its text."""
    if output["output_type"] == "stream":
        return _fenced("".join(output["text"]))
    data = output["data"]
    if "image/png" not in data:
        return _fenced("".join(data["text/plain"]))
    name = f"{stem}-{len(pictures)}.png"
    pictures[name] = base64.b64decode("".join(data["image/png"]))
    return f"![the picture below the cell]({name})"


def _fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"
