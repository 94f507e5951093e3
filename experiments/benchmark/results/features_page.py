"""The page of features by system, written from docs/features.toml."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.benchmark.results.table import markdown

RECORD, PAGE = "docs/features.toml", "docs/features.md"
STATES = ("yes", "loses", "part", "no")
TOLD = """# Features

Five systems were the models of this library. The tables list their features, and where each is here.

| state | means |
| --- | --- |
| yes | it is here, and the last column shows it |
| loses | it was built and measured, and something simpler is as good: the next column says by which figures |
| part | the next column says what is missing, or was not measured |
| no | nothing here does it |

A test runs by `pytest --slow TEST`. A file of figures names the commit whose script made it. [Results](results.md) has
its tables, and [known limits](known-limits.md) what fails or is slow.

`python -m experiments.benchmark features_page` writes the page from `docs/features.toml`. A test imports all names, and
looks up all tests, commands and files."""


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
        heads = ("id", "feature", "state", "lacks, or loses by", "name", "shown by")
        parts += [f"## {system['name']}", markdown(heads, map(_row, system["features"]))]
    return "\n\n".join(parts) + "\n"


def state_of(feature: Mapping[str, Any]) -> str:
    """Return the state: one that lost says so, one without a place is absent, and one that lacks something a part."""
    if "loses" in feature:
        return "loses"
    if "where" not in feature:
        return "no"
    return "part" if "lacks" in feature else "yes"


def _counts(system: Mapping[str, Any]) -> tuple[str, ...]:
    counts = Counter(map(state_of, system["features"]))
    return system["name"], str(counts.total()), *(str(counts[state]) for state in STATES)


def _row(feature: Mapping[str, Any]) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in feature.get("where", ()))
    shown = f"`{feature['shown_by']}`" if "shown_by" in feature else ""
    return (
        feature["id"],
        feature["what"],
        state_of(feature),
        feature.get("loses", feature.get("lacks", "")),
        names,
        shown,
    )
