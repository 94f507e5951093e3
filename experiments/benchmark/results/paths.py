"""Paths into files of the record, as the page's tables have them.

runs                    the items of a list, one row each
shapes.{shape}          the values of a mapping, one row each, whose keys are named
seconds.median          of the innermost mapping of the row that has `seconds`
growth.{mixer}.value    under the key that the row has as `mixer`
state.bytes[-1], contexts[context=512,mixer={mixer}]    an item of a list
*.median                of both passes: a list of two
@fastest                what that function of `derived` makes of the row
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.benchmark.results import derived

Row = ChainMap[str, Any]
"""An item of a file, in front of all that lies above it."""
PASSES = ("forward", "forward+backward", "forward_backward")
"""Names of the two passes; the last two mean the same."""


def rows(figures: Mapping[str, Any], path: str) -> list[Row]:
    """Return the rows that a path leads to."""
    found = [ChainMap(dict(figures))]
    for name in filter(None, path.split(".")):
        found = [below for row in found for below in _below(row, name)]
    return found


def _below(row: Row, name: str) -> Iterator[Row]:
    here = row.maps[0]
    if name.startswith("{"):
        entered = [({name[1:-1]: key}, value) for key, value in here.items()]
    elif name.startswith("@"):
        entered = [({}, getattr(derived, name[1:])(row))]
    else:
        entered = [({}, here[name])] if name in here else []
    for known, value in entered:
        for item in value if isinstance(value, list) else [value]:
            yield ChainMap(item if isinstance(item, dict) else {"value": item}, known, *row.maps)


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """Return what a path names in a row, or None. A path in double quotes is a text."""
    if path.startswith('"'):
        return path.strip('"')
    return _within(row, re.findall(r"[^.\[\]]+|\[[^\]]*\]", path), row)


def _within(found: Any, path: list[str], row: Mapping[str, Any]) -> Any:
    if not path or found is None:
        return found
    name, *rest = path
    if name == "*":
        both = [found[at] for at in PASSES if at in found] if isinstance(found, Mapping) else []
        return [_within(each, rest, row) for each in both] or None
    if name.startswith("@"):
        found = getattr(derived, name[1:])(found)
    elif name.startswith("["):
        found = found[int(name[1:-1])] if "=" not in name else _first(found, name[1:-1].format_map(row))
    else:
        found = found.get(str(row[name[1:-1]]) if name.startswith("{") else name)
    return _within(found, rest, row)


def _first(found: list[Any], wanted: str) -> Any:
    """Return the first item with those values, such as "devices=1,bytes=8192", or None."""
    pairs = [pair.split("=") for pair in wanted.split(",")]
    return next((item for item in found if all(str(item[key]) == value for key, value in pairs)), None)
