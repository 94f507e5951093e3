"""Files of the record, and where their figures were measured."""

import json
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Folder = dict[str, Figures]
"""A record's files by name, without `.json`."""


def read_folder(folder: Path) -> Folder:
    """Read every JSON file of a folder.

    Raises:
      FileNotFoundError: there is none.
    """
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
    }
    if not found:
        raise FileNotFoundError(f"no JSON files in {folder}: run from the repository's root")
    return found


def runs(figures: Figures) -> list[Figures]:
    """Return the runs of a file that holds several calls, or the file itself."""
    held = figures.get("runs", [])
    return held if held and any(key in held[0] for key in ("machine", "git", "commit")) else [figures]


def origins(figures: Figures) -> list[tuple[str, str, str]]:
    """Return device, jax and commit of each run in a file."""
    return list(dict.fromkeys(_origin(run, figures) for run in runs(figures)))


def flags(figures: Figures) -> str:
    """Return `XLA_FLAGS` of the process that measured, or nothing."""
    return figures.get("environment", {}).get("XLA_FLAGS", "")


def gpu(figures: Figures) -> str:
    """Return the kind of GPU that measured a file, as in H200, or CPU."""
    device = origins(figures)[0][0]
    return device.split("NVIDIA ")[1].split()[0] if "NVIDIA" in device else "CPU"


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
