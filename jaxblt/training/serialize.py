"""Frozen dataclasses as JSON and back, exactly, with nothing pickled."""

import dataclasses
import importlib
import json
import math
import sys
from typing import Any

CLASS = "class"


def to_json(config: Any) -> str:
    """`config` as indented JSON; each dataclass carries its class as "module:Name".

    Raises:
      TypeError: a field holds something other than a dataclass, tuple, string, number, bool or None.
      ValueError: a float is not finite.
    """
    return json.dumps(encode(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> Any:
    """The inverse of `to_json`; fields that were left out take their defaults.

    Raises:
      ValueError: a class cannot be found, or a field is unknown to it or missing.
    """
    return decode(json.loads(text))


def encode(value: Any, where: str = "config") -> Any:
    """`value` in terms of what JSON knows: dataclasses as objects with a "class", tuples as arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        fields = {name: encode(item, f"{where}.{name}") for name, item in named.items()}
        return {CLASS: f"{type(value).__module__}:{type(value).__qualname__}", **fields}
    if isinstance(value, tuple):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}: JSON has no such number, use None or a finite one")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__name__}: configs hold frozen dataclasses, tuples, strings, numbers, bools, None"
    )


def decode(value: Any, where: str = "config") -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return tuple(decode(item, f"{where}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        raise ValueError(f'{where} has no "{CLASS}": expected a dataclass as written by to_json')
    kind = _find(value[CLASS], where)
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(value) - known - {CLASS})
    if unknown:
        raise ValueError(f"{where}: {value[CLASS]} has no field {', '.join(unknown)}; it has {sorted(known)}")
    fields = {name: decode(item, f"{where}.{name}") for name, item in value.items() if name != CLASS}
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{where}: {value[CLASS]} cannot be built from its fields: {error}") from error


def _find(name: str, where: str) -> type:
    """The dataclass called "module:Name". A file may name classes of this library or ones already imported, no more."""
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
            f"{where}: class {name!r} is unknown; import {module_name!r} before reading this config"
        )
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{where}: {name!r} is not a dataclass")
    return found
