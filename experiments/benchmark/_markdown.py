"""Figures as Markdown: tables, numbers with units, and where a file's figures were measured."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Folder = dict[str, Figures]
"""A record's files by name, without `.json`."""


def read_folder(folder: Path) -> Folder:
    """Every JSON file of a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    }
    if not found:
        raise FileNotFoundError(f"no JSON files in {folder}: run from the repository's root")
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has as many cells as the head."""
    lines = [head, ["---"] * len(head), *rows]
    if odd := [line for line in lines if len(line) != len(head)]:
        raise ValueError(f"a row has {len(odd[0])} cells and the head {len(head)}: {odd[0]}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prose(text: str) -> str:
    """A paragraph in lines of 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def rounded(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, thousands separated."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    return f"{float(text):,.0f}" if abs(value) >= 1 else text


def ms(seconds: float) -> str:
    """Seconds as milliseconds, three significant digits."""
    return rounded(1e3 * seconds)


def spread(taken: Figures) -> str:
    """Median in ms with its 95 % interval, or with the extremes where a file has those."""
    ends = (taken["low"], taken["high"]) if "low" in taken else (taken["least"], taken["most"])
    return f"{ms(taken['median'])} ({ms(ends[0])} to {ms(ends[1])})"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f} %"


def gigabytes(count: float) -> str:
    """Bytes as GB (10^9)."""
    return f"{count / 1e9:.1f} GB"


def rate(bytes_per_second: float) -> str:
    """Bytes a second in KB/s or MB/s (10^3, 10^6)."""
    if bytes_per_second >= 1e6:
        return f"{bytes_per_second / 1e6:.2f} MB/s"
    return f"{bytes_per_second / 1e3:.0f} KB/s"


def count(number: float) -> str:
    """A whole number with its thousands separated."""
    return f"{number:,.0f}"


def runs(figures: Figures) -> list[Figures]:
    """The runs of a file that holds several, or the file itself."""
    held = figures.get("runs", [])
    return held if held and any(key in held[0] for key in ("machine", "git", "commit")) else [figures]


def origins(figures: Figures) -> list[tuple[str, str, str]]:
    """Device, jax and commit of each run in a file: read from the schema of now and from the older ones."""
    return list(dict.fromkeys(_origin(run, figures) for run in runs(figures)))


def flags(figures: Figures) -> str:
    """`XLA_FLAGS` of the process that measured, or nothing."""
    return figures.get("environment", {}).get("XLA_FLAGS", "")


def _origin(run: Figures, whole: Figures) -> tuple[str, str, str]:
    machine, devices = run.get("machine", {}), run.get("devices", {})
    device = machine.get("device") or devices.get("kind") or run.get("device") or whole.get("device")
    number = machine.get("device_count") or devices.get("count") or 1
    if devices.get("platform") == "cpu":
        device, number = run["cpu"], 1
    git = run.get("git", {})
    commit = machine.get("commit") or git.get("commit") or run.get("git_commit") or run.get("commit")
    jax = machine.get("jax") or run.get("versions", {}).get("jax") or run.get("jax") or whole.get("jax")
    if not (device and jax and commit):
        raise ValueError(f"a result has device {device}, jax {jax}, commit {commit}: it needs all three")
    dirty = "-dirty" if git.get("dirty") else ""
    return (f"{number} x {device}" if number > 1 else str(device), str(jax), str(commit)[:12] + dirty)
