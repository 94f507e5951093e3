"""A short `repr` for configs and states: the text that a notebook or a debugger shows of an object."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np

MOST = 1_800
"""The most characters of an object."""
MOST_TEXT = 120
"""The most characters of a text, or of a value of an unknown type."""
MOST_ITEMS = 6
"""The most items that are shown of a sequence, and the most arrays of a tree that are shown one by one."""


def show(self: Any) -> str:
    """Write an object as the call that makes it, without fields at their defaults and without the contents of arrays.

    Classes use it by `__repr__ = show`.
    """
    return _cut(_write_call(self), MOST)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _write_call(value: Any) -> str:
    given = _held_fields(value)
    inside = ", ".join(f"{name}={_write_value(part)}" for name, part in given.items())
    return f"{type(value).__name__}({inside})"


def _held_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a named tuple that are shown."""
    if not is_dataclass(value):
        return value._asdict()
    asked = {field.name: field for field in fields(value) if field.repr}
    held = {name: getattr(value, name) for name in asked if hasattr(value, name)}
    return {name: part for name, part in held.items() if not _is_default(part, asked[name])}


def _is_default(part: Any, field: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    try:
        return part is default or (type(part) is type(default) and bool(part == default))
    except Exception:
        return False  # Compare no arrays: they have no one answer


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _write_value(value: Any) -> str:
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(...)"
    if isinstance(value, type):
        return value.__name__
    if is_dataclass(value) or hasattr(value, "_fields"):
        return _write_call(value)
    if _is_array(value) and not isinstance(value, np.generic):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, Mapping):
        return _write_mapping(value)
    if isinstance(value, list | tuple):
        return _write_sequence(value)
    return _cut(repr(value), MOST_TEXT)


def _write_mapping(value: Mapping[Any, Any]) -> str:
    arrays = [leaf for leaf in jax.tree.leaves(dict(value)) if _is_array(leaf)]
    if len(arrays) > MOST_ITEMS:
        return f"<{len(arrays)} arrays of {sum(leaf.size for leaf in arrays):,} numbers>"
    return "{" + ", ".join(f"{name!r}: {_write_value(part)}" for name, part in value.items()) + "}"


def _write_sequence(value: list[Any] | tuple[Any, ...]) -> str:
    items = [_write_value(item) for item in value[:MOST_ITEMS]]
    more = [f"... {len(value) - MOST_ITEMS} more"] if len(value) > MOST_ITEMS else []
    text = ", ".join([*items, *more])
    return f"[{text}]" if isinstance(value, list) else f"({text},)" if len(value) == 1 else f"({text})"
