"""Frozen dataclasses as JSON and back, exactly, with nothing pickled.

Classes are stored under the short names of `names.py`. A class that has changed since has `upgrade(fields) -> fields`,
which turns what an older version stored into today's fields.
"""

import dataclasses
import importlib
import json
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxblt.training.stored.names import place_of, stored_name
from jaxblt.validation import forgiving

CLASS = "class"
TABLE = "table"
"""What stands for a class where configs are kept by name."""
LARGEST = 2**64 - 1
NOTHING = "nothing"
"""Shown for a key that one of two compared mappings lacks."""
TOO_DEEP = "objects and arrays are nested too deeply for a config"


def to_json(config: Any) -> str:
    """Write `config` as indented JSON; each dataclass carries the name of its class.

    Raises:
      TypeError: a field holds something other than a dataclass, tuple, string, number, bool or None.
      ValueError: a float is not finite.
    """
    return json.dumps(encode(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Any:
    """Read what `to_json` wrote; fields that were left out take their defaults.

    Raises:
      ValueError: it is not JSON, or as of `decode`.
    """
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    return decode(tree)


def encode(value: Any, where: str = "config") -> Any:
    """Write `value` in terms of what JSON knows: dataclasses and tables as objects with a "class", tuples as arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        fields = {name: encode(item, f"{where}.{name}") for name, item in named.items()}
        return {CLASS: stored_name(type(value)), **fields}
    if isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, value.values())):
        return {CLASS: TABLE} | {name: encode(item, f"{where}[{name!r}]") for name, item in value.items()}
    if isinstance(value, tuple):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: JSON has no such number, use None or a finite one")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}: configs hold frozen dataclasses, tuples, tables, strings, numbers, None"
    )


def decode(value: Any, where: str = "config") -> Any:
    """Read what `encode` wrote.

    Raises:
      ValueError: a class cannot be found; a field is unknown to it, missing, of another type or out of range.
    """
    try:
        with forgiving():
            return _decode(value, where)
    except RecursionError as error:
        raise ValueError(f"{where}: {TOO_DEEP}") from error


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item, f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, expected a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{where} is a whole number of {value.bit_length()} bits, expected at most 64")
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        raise ValueError(f'{where} has no "{CLASS}": expected a dataclass as written by to_json')
    if not isinstance(value[CLASS], str):
        raise ValueError(f"{where}.{CLASS} is {value[CLASS]!r:.80}, expected a name or 'module:Name'")
    if value[CLASS] == TABLE:
        return {name: _decode(item, f"{where}[{name!r}]") for name, item in value.items() if name != CLASS}
    kind = _find(place_of(value[CLASS]), where)
    fields = {name: _decode(item, f"{where}.{name}") for name, item in value.items() if name != CLASS}
    fields = getattr(kind, "upgrade", lambda stored: stored)(fields)
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{where}: {value[CLASS]} has no field {', '.join(unknown)}; it has {sorted(known)}")
    _check_types(kind, fields, where)
    try:
        return kind(**fields)
    except (TypeError, AttributeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{where}: {value[CLASS]} cannot be built from its fields: {error}") from error


def _check_types(kind: type, fields: dict[str, Any], where: str) -> None:
    try:
        hints = get_type_hints(kind)
    except NameError:  # annotations may name what only type checkers import
        return
    for name, value in fields.items():
        if not _fits(value, hints[name]):
            expected = getattr(hints[name], "__name__", None) if isinstance(hints[name], type) else None
            raise ValueError(f"{where}.{name} is {value!r:.80}, expected {expected or hints[name]}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a decoded value is of an annotated type, as far as JSON can tell types apart."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = inner[:1] * len(value) if inner[-1:] == (...,) else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint is float:
        return type(value) in (int, float)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint in (bool, int, str, types.NoneType):
        return type(value) is hint
    return not dataclasses.is_dataclass(hint) or isinstance(value, hint)  # pyright: ignore[reportArgumentType]


def _find(name: str, where: str) -> type:
    """Find the dataclass called "module:Name".

    A file may name classes of this library or ones that are imported already, no more.
    """
    module_name, _, qualified = str(name).partition(":")
    if module_name.partition(".")[0] == "jaxblt":
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{where}: there is no module {module_name!r} in this version of jaxblt"
            ) from error
    found: Any = sys.modules.get(module_name)
    if found is None:
        raise ValueError(
            f"{where}: class {name!r} is unknown; import {module_name!r} before reading this config, on a command "
            f"line by --import {module_name}"
        )
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and _is_frozen(found)):
        raise ValueError(f"{where}: {name!r} is not a frozen dataclass")
    return found


def _is_frozen(kind: Any) -> bool:
    return kind.__dataclass_params__.frozen


def differences(old: Any, new: Any, where: str = "recipe") -> list[str]:
    """Return what differs between two configs, one "path: old -> new" a field."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        return [d for name in old for d in differences(old[name], new[name], f"{where}[{name!r}]")]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = [*old, *(name for name in new if name not in old)]
        shown = [(name, *(repr(of[name]) if name in of else NOTHING for of in (old, new))) for name in names]
        return [f"{where}[{name!r}]: {was} -> {now}" for name, was, now in shown if was != now]
    if type(old) is not type(new) or not dataclasses.is_dataclass(old):
        return [] if old == new else [f"{where}: {old!r} -> {new!r}"]
    names = [field.name for field in dataclasses.fields(old)]
    return [
        d for name in names for d in differences(getattr(old, name), getattr(new, name), f"{where}.{name}")
    ]
