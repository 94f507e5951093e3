"""The page of what layers of this and other projects promise and do, written from JSON.

The files lie in experiments/results/conformance. Each names the commit of the bridges that measured it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.benchmark.results.conformance_notes import NOTES
from experiments.benchmark.results.conformance_picture import draw_table
from experiments.benchmark.results.files import Figures, read_folder
from experiments.benchmark.results.table import fill, markdown

RECORD = "experiments/results/conformance"
PAGE, PICTURE = "docs/conformance.md", "docs/conformance.svg"
HERE = Path(__file__).parent
OURS = "jaxblt"
"""The names of the last rows begin with it."""


def conformance_page(root: str = ".") -> None:
    """Write the page of conformance and its picture from experiments/results/conformance.

    Args:
      root: of the repository.

    Raises:
      FileNotFoundError: the folder has no record.
    """
    for name, text in pages(Path(root)).items():
        Path(root, name).write_text(text, encoding="utf-8")
        print(name)


def pages(root: Path) -> dict[str, str]:
    """Return page and picture by path."""
    files = list(read_folder(root / RECORD).values())
    subjects = in_order(files)
    return {PAGE: page(files, subjects), PICTURE: draw_table([each for each in subjects if each["outcomes"]])}


def in_order(files: list[Figures]) -> list[Figures]:
    """Return the subjects of files by name, ours last."""
    subjects = [each for file in files for each in file["subjects"]]
    return sorted(subjects, key=lambda each: (each["name"].startswith(OURS), each["name"].lower()))


def page(files: list[Figures], subjects: list[Figures]) -> str:
    """Return the page."""
    told = (HERE / "conformance.md").read_text(encoding="utf-8")
    failing = [each for each in subjects if any("script" in found for found in each["outcomes"].values())]
    parts = [
        told.strip(),
        "## Layers",
        markdown(("layer", "version", "dtype", "checked", "tolerance", "does not hold"), map(_row, subjects)),
        "## What does not hold",
        *(_section(each) for each in failing),
        "## Calls",
        markdown(("layer", "called as"), ((each["name"], f"`{each['called']}`") for each in subjects)),
        "## Machines",
        markdown(("layers", "device", "torch", "jax", "commit"), map(_machine, files)),
    ]
    return "\n\n".join(parts) + "\n"


def _row(subject: Figures) -> tuple[str, ...]:
    outcomes = subject["outcomes"]
    if not outcomes:
        return subject["name"], subject.get("version") or "", "", f"not run: {subject['not_run']}", "", ""
    failed = [name.replace("_", " ") for name, found in outcomes.items() if "script" in found]
    usual = max(found["limit"] for name, found in outcomes.items() if name != "gradients")
    checked = f"{len(outcomes)} of {len(properties())}" + (", not finished" if "not_run" in subject else "")
    said = f"**{', '.join(failed)}**" if failed else "nothing"
    return subject["name"], subject["version"], subject["dtype"], checked, f"{usual:.1e}", said


def properties() -> tuple[str, ...]:
    """Return the names of all properties."""
    from jaxblt.testing.conformance import PROPERTIES

    return tuple(PROPERTIES)


def _section(subject: Figures) -> str:
    """Return what does not hold of a layer, and the script of the first of it."""
    found = {name: each for name, each in subject["outcomes"].items() if "script" in each}
    rows = [_finding(name, each) for name, each in found.items()]
    heads = ("property", "smallest input", "error", "tolerance", "shown again by its script")
    first = next(iter(found))
    parts = [f"### {subject['name']}", markdown(heads, rows)]
    if noted := NOTES.get(subject["name"]):
        parts.append(fill(noted))
    return "\n\n".join([*parts, f"`{first}`:", f"```text\n{found[first]['script'].strip()}\n```"])


def _finding(name: str, found: Figures) -> tuple[str, ...]:
    size = f"{found['length']} tokens" + ("" if found["cut"] is None else f", cut at {found['cut']}")
    if found["says"]:
        error, limit = found["says"], ""
    else:
        error = "not finite" if found["error"] is None else f"{found['error']:.1e}"
        limit = f"{found['limit']:.1e}"
    return f"`{name}`", size, error, limit, f"{found['reproduced']} times of 2"


def _machine(file: Figures) -> tuple[str, ...]:
    names = list(_projects(file))
    device = file["devices"]["kind"] if file["devices"]["platform"] != "cpu" else file["cpu"]
    git: Any = file["git"]
    commit = git["commit"][:12] + ("-dirty" if git.get("dirty") else "")
    return ", ".join(names), device, file["versions"].get("torch", ""), file["versions"]["jax"], commit


def _projects(file: Figures) -> Iterator[str]:
    yield from dict.fromkeys(each["name"].partition(":")[0] for each in file["subjects"])
