"""The promises about documents in rows that mixers may take for granted."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

PROMISES = ("packed", "segment_alignment")
"""Fields of mixer configs that say how documents lie in rows."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The layout of documents in rows; the defaults promise nothing.

    Attributes:
      packed: a row may hold several documents. False promises one a row, with holes and tail padding allowed.
      segment_alignment: documents start at multiples of it.
    """

    packed: bool = True
    segment_alignment: int = 1


def promise[C](config: C, rows: RowLayout) -> C:
    """Return `config` with the promises of `rows` in every mixer inside it that takes them."""
    if isinstance(config, tuple):
        return type(config)(promise(item, rows) for item in config)
    if isinstance(config, Mapping):
        kind: Any = type(config)
        return kind({name: promise(item, rows) for name, item in config.items()})
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    changes = {}
    for name, old in _members(config):
        new = getattr(rows, name) if name in PROMISES else promise(old, rows)
        if new != old:
            changes[name] = new
    return dataclasses.replace(config, **changes) if changes else config


def promises(config: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every promise inside `config`, which is found at `where`."""
    if isinstance(config, tuple):
        for i, item in enumerate(config):
            yield from promises(item, f"{where}[{i}]")
    elif isinstance(config, Mapping):
        for name, item in config.items():
            yield from promises(item, f"{where}[{name!r}]")
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        for name, value in _members(config):
            path = f"{where}.{name}"
            yield from [(path, value)] if name in PROMISES else promises(value, path)


def off_grid(config: Any) -> int:
    """Return the factor by which `segment_alignment` has to grow for every mixer in `config`.

    Then documents start where each of them needs it. A mixer that needs them at multiples of a number in training says
    so by `training_grid`.
    """
    members: Any = ()
    if isinstance(config, tuple):
        members = config
    elif isinstance(config, Mapping):
        members = config.values()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        members = [value for _, value in _members(config)]
    grid = getattr(config, "training_grid", 1)
    own = grid // math.gcd(grid, getattr(config, "segment_alignment", 1))
    return math.lcm(own, *map(off_grid, members))


def _members(config: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config) if field.init]
