"""The page of features by system, written from docs/features.toml."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.benchmark.results.table import markdown

RECORD, PAGE = "docs/features.toml", "docs/features.md"
STATES = ("yes", "part", "no")
TOLD = """# Features

What each of five systems was to have, and what there is. A row is `yes` where a test or a measurement shows all of it,
`part` where something lacks, and `no` where nothing does it. A test runs by `pytest --slow TEST`. `python -m
experiments.benchmark NAME` measures; [results](results.md) has its figures. [Known limits](known-limits.md) says what
fails or is slow.

The page is written by `python -m experiments.benchmark features_page` from `docs/features.toml`. A test imports what it
names, and looks each test and command up."""


def features_page(root: str = ".") -> None:
    """Write the page of features by system from docs/features.toml.

    Args:
      root: of the repository.
    """
    Path(root, PAGE).write_text(page(read_systems(Path(root))), encoding="utf-8")
    print(PAGE)


def read_systems(root: Path) -> list[dict[str, Any]]:
    """Return the systems of the record, each with its name and its features."""
    return tomllib.loads((root / RECORD).read_text(encoding="utf-8"))["systems"]


def page(systems: list[dict[str, Any]]) -> str:
    """Return the page."""
    parts = [TOLD, markdown(("system", "features", *STATES), map(_counts, systems))]
    for system in systems:
        heads = ("id", "feature", "state", "lacks", "name", "shown by")
        parts += [f"## {system['name']}", markdown(heads, map(_row, system["features"]))]
    return "\n\n".join(parts) + "\n"


def state_of(feature: Mapping[str, Any]) -> str:
    """Return yes, part or no: a feature that has no place is absent, and one that lacks something a part."""
    if "where" not in feature:
        return "no"
    return "part" if "lacks" in feature else "yes"


def _counts(system: Mapping[str, Any]) -> tuple[str, ...]:
    counts = Counter(map(state_of, system["features"]))
    return system["name"], str(counts.total()), *(str(counts[state]) for state in STATES)


def _row(feature: Mapping[str, Any]) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in feature.get("where", ()))
    shown = f"`{feature['shown_by']}`" if "shown_by" in feature else ""
    return feature["id"], feature["what"], state_of(feature), feature.get("lacks", ""), names, shown
