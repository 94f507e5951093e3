"""What the documents show: blocks of Python, and command lines of `jaxblt`."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = ("", "sh", "bash")
INLINE = re.compile(r"`(jaxblt [^`\[]*\b(?:RUN_DIR|FILE|HF_DIR)\b[^`\[]*)`")
"""A whole command in a sentence or a table: it names a folder or a file, and no option in brackets."""


def name_of(page: Path) -> str:
    """A page by its path below the root."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def command_lines(page: Path) -> list[list[str]]:
    """Arguments of each command of `jaxblt` on a page, in shell blocks, sentences and tables."""
    lines = [line for block in blocks(page, *SHELL) for line in block.splitlines()]
    lines += INLINE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    words = [re.sub(r"^(\w+=\S+ )+", "", line) for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in words if line.startswith("jaxblt ")]
