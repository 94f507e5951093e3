"""Fields of a recipe that take configs of several kinds, or none: chosen by name on a command line.

`--objective masked` puts the kind of that name, with its defaults, into the recipe before other options are read, so
that `--objective.rate 0.3` is one of them. `--patcher.mode space` alone puts a patcher into a recipe without one.
"""

import copy
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxblt.training.recipe import Recipe

NONE = "none"


@cache
def kinds() -> dict[str, dict[str, type | None]]:
    """Return the kinds of each field with a choice, by name.

    Such as `{"objective": {"next-byte": NextByte, ...}, ...}`. Kinds are configs that can be made without arguments,
    and None where the field is optional.
    """
    found = {}
    for name, hint in get_type_hints(Recipe).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        named: dict[str, type | None] = {_name_of(part): part for part in parts if _has_defaults(part)}
        if NoneType in parts and named:
            named[NONE] = None
        if len(named) > 1:
            found[name] = named
    return found


def choices() -> str:
    """List what can be chosen, for a help text."""
    told = []
    for field, named in kinds().items():
        names = [name for name in named if len(named) > 2 or name == NONE]
        told.append(f"--{_option(field)} {'|'.join(names)}")
    return f"Another kind of a part: {', '.join(told)}; then its own options."


def choose_kinds(recipe: Recipe, argv: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Return the recipe with the kinds that `argv` names, and the words that are left.

    The recipe is checked when all options have been read: two choices may fit together only with each other.

    Raises:
      ValueError: a field has no kind of that name, or options follow for a part that the recipe lacks.
    """
    left: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        field, _, rest = name.removeprefix("--").replace("-", "_").partition(".")
        if not word.startswith("--") or field not in kinds():
            left.append(word)
            continue
        if rest:
            recipe = _with_some(recipe, field)
            left.append(word)
            continue
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else ""
        recipe = _with_kind(recipe, field, value)
    return recipe, left


def unchecked(recipe: Recipe, **changes: Any) -> Recipe:
    """Return a copy with other fields, without checking that all fit together."""
    changed = copy.copy(recipe)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def _with_kind(recipe: Recipe, field: str, name: str) -> Recipe:
    named = kinds()[field]
    if name.replace("_", "-") not in named:
        got = repr(name) if name else "no name"
        raise ValueError(f"--{_option(field)}: expected one of {', '.join(named)}, got {got}")
    kind = named[name.replace("_", "-")]
    if kind is None:
        return unchecked(recipe, **{field: None})
    return recipe if isinstance(getattr(recipe, field), kind) else unchecked(recipe, **{field: kind()})


def _with_some(recipe: Recipe, field: str) -> Recipe:
    """Return the recipe with the only kind of an optional part that it lacks."""
    if getattr(recipe, field) is not None:
        return recipe
    some = {name: kind for name, kind in kinds()[field].items() if kind is not None}
    if len(some) > 1:
        raise ValueError(f"the recipe has no {field}: say which with --{_option(field)} {'|'.join(some)}")
    return _with_kind(recipe, field, next(iter(some)))


def _option(field: str) -> str:
    return field.replace("_", "-")


def _name_of(kind: type) -> str:
    """Write "OrderAgnostic" as order-agnostic, "AdamWConfig" as adamw."""
    word = kind.__name__.removesuffix("Config")
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", word).lower()


def _has_defaults(kind: Any) -> bool:
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return False
    return all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(kind) if f.init)
