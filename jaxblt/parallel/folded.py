"""The table of shardings in short: a line for each kind of layer instead of one for each parameter."""

import math
import re
from typing import Any

from jax.sharding import Mesh

from jaxblt.parallel.rules import (
    DEFAULT_RULES,
    Placement,
    Rules,
    bytes_per_device,
    placements,
    sharding_table,
)

MOST_LINES = 15
"""Parameters of a table that is not folded."""
LAYER = re.compile(r"block_\d+")


def short_table(boxed: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES, *, most: int = MOST_LINES) -> str:
    """Write `sharding_table`, folded where it has more than `most` parameters.

    A line is a layer of a stack's period, or else a module at the top. Layers of a stack whose parameters agree in
    names, shapes and shardings share a line. Both forms name the mesh axes that the rules left out.
    """
    found = placements(boxed, mesh, rules)
    if len(found) <= most:
        return sharding_table(boxed, mesh, rules)
    groups: dict[str, dict[str, Placement]] = {}
    for name, placement in found.items():
        own, rest = layer_of(name)
        groups.setdefault(own, {})[rest] = placement
    alike: dict[tuple[str, str], list[str]] = {}
    for own, parts in groups.items():
        alike.setdefault((own.partition("/")[0], repr(parts)), []).append(own)
    rows: list[tuple[str, ...]] = [("layer", "arrays", "parameters", "bytes/device", "split along", "")]
    for names in alike.values():
        rows.append(_row(names, groups[names[0]], mesh))
    total = sum(bytes_per_device(placement, mesh) for placement in found.values())
    count = sum(math.prod(placement.shape) for placement in found.values())
    rows.append(("total", str(len(found)), f"{count:,}", f"{total:,}", "", str(dict(mesh.shape))))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}  {e:<{widths[4]}}  {f}".rstrip()
        for a, b, c, d, e, f in rows
    )


def layer_of(name: str) -> tuple[str, str]:
    """Split a parameter's path into its layer, such as "latent/periods/block_0", and the rest.

    A parameter outside of layers has the module at the top.
    """
    parts = name.split("/")
    layers = [i for i, part in enumerate(parts) if LAYER.fullmatch(part)]
    end = layers[0] + 1 if layers else 1
    return "/".join(parts[:end]), "/".join(parts[end:])


def _row(names: list[str], parts: dict[str, Placement], mesh: Mesh) -> tuple[str, ...]:
    """Return a row of layers that are alike: numbers are of all of them together."""
    times = len(names)
    axes = sorted({str(axis) for part in parts.values() for axis in part.spec if axis is not None})
    notes = dict.fromkeys(note for part in parts.values() for note in part.notes)
    return (
        names[0] if times == 1 else f"{names[0]} and {times - 1} alike",
        str(times * len(parts)),
        f"{times * sum(math.prod(part.shape) for part in parts.values()):,}",
        f"{times * sum(bytes_per_device(part, mesh) for part in parts.values()):,}",
        ", ".join(axes) or "-",
        "; ".join(notes),
    )
