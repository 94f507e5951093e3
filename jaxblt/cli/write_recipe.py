"""A recipe as Python source: what `jaxblt new` writes.

Fields that have their default are left out. Fields of the recipe and of its parts carry what their class's docstring
says of them. Every text that others chose (names of files and folders, strings of a recipe) is escaped as a literal.
"""

import inspect
import json
import keyword
import re
import shlex
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from jaxblt.training.recipe import Recipe

WIDTH = 100
COMMENTED = 2
"""Levels of a recipe whose fields carry comments: its own, and those of its parts."""


def function_name(recipe: Recipe, stem: str) -> str:
    """Return the name of a recipe's function: its file's if Python allows it, else "recipe"."""
    # Name the parameter in this form, as Python reads it: the command line must say it, too
    name = unicodedata.normalize("NFKC", stem)
    taken = {kind.__name__ for kind in _classes(recipe)}
    return name if name.isidentifier() and not keyword.iskeyword(name) and name not in taken else "recipe"


def recipe_source(recipe: Recipe, *, function: str, file: str, origin: str) -> str:
    """Return a module with a function that returns an equal recipe.

    Args:
      recipe: to write down.
      function: its name (`function_name`).
      file: that the module will be, for the commands in its docstring.
      origin: where the recipe is from.
    """
    imports: dict[str, set[str]] = {}
    for kind in _classes(recipe):
        imports.setdefault(public_module(kind), set()).add(kind.__name__)
    imported = "\n".join(_import(module, sorted(names)) for module, names in sorted(imports.items()))
    place = _escaped(shlex.quote(f"{file}:{function}"))
    return f'''"""A recipe of your own, begun from {_escaped(origin)}.

Train it:           jaxblt train {place}
See every field:    jaxblt train {place} --help
Change one:         jaxblt train {place} --train.steps 100
Plan its memory:    jaxblt plan {place}

Fields that are not written here have their defaults.
"""

{imported}


def {function}() -> Recipe:
    """Say here what it trains, and what came out."""
    return {_rendered(recipe, 1, COMMENTED)}
'''


def _escaped(text: str) -> str:
    """Escape a text for double quotes, one or three, in a Python file of UTF-8."""
    shown = json.dumps(text, ensure_ascii=False)[1:-1]
    # Escape lone surrogates, which stand for bytes of file names that are no UTF-8
    return shown.encode("utf-8", "backslashreplace").decode("utf-8")


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes of all configs that the source of `value` names."""
    if is_dataclass(value):
        yield type(value)
        for _, item in _chosen(value):
            yield from _classes(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _classes(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _classes(item)


def _chosen(config: Any) -> list[tuple[str, Any]]:
    """Return fields, and their values, that are not their class's defaults."""
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.init and (default is MISSING or type(value) is not type(default) or value != default):
            found.append((field.name, value))
    return found


def _rendered(value: Any, depth: int, comments: int) -> str:
    """Return the source of a value that begins on a line indented `depth` times.

    The next lines are indented too.
    """
    if isinstance(value, Mapping):
        items = [("", f'"{_escaped(name)}": {_rendered(item, depth + 1, 0)}') for name, item in value.items()]
        return _brackets("{", items, "}", depth)
    if isinstance(value, tuple):
        items = [("", _rendered(item, depth + 1, 0)) for item in value]
        return f"({items[0][1]},)" if len(items) == 1 else _brackets("(", items, ")", depth)
    if not is_dataclass(value):
        return f'"{_escaped(value)}"' if isinstance(value, str) else repr(value)
    docs = field_docs(type(value)) if comments else {}
    items = [
        (docs.get(name, ""), f"{name}={_rendered(item, depth + 1, comments - 1 if comments else 0)}")
        for name, item in _chosen(value)
    ]
    return _brackets(f"{type(value).__name__}(", items, ")", depth)


def _brackets(opening: str, items: list[tuple[str, str]], closing: str, depth: int) -> str:
    """Write items with their comments, on one line if they are short and have none."""
    flat = opening + ", ".join(text for _, text in items) + closing
    if not any(comment for comment, _ in items) and "\n" not in flat and len(flat) < WIDTH - 4 * depth - 16:
        return flat
    margin = "    " * (depth + 1)
    lines = [opening]
    for comment, text in items:
        lines += textwrap.wrap(comment, WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}# ")
        lines.append(f"{margin}{text},")
    return "\n".join([*lines, "    " * depth + closing])


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Read what the "Attributes" in docstrings of a config and its bases say of fields."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        found |= _attributes(inspect.cleandoc(base.__doc__ or ""))
    return found


def _attributes(doc: str) -> dict[str, str]:
    _, _, section = doc.partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith("  "):
            break
        if start := re.match(r"  (\w+(?:, \w+)*): (.*)", line):
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif line.startswith("    "):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def public_module(kind: type) -> str:
    """Return the shortest module of the library that has a class under its name."""
    parts = kind.__module__.split(".")
    for length in range(2, len(parts)):
        module = ".".join(parts[:length])
        if getattr(import_module(module), kind.__name__, None) is kind:
            return module
    return kind.__module__
