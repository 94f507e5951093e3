"""Checks of values: configs when they are made, and numbers that public functions are given.

Below all rooms: only the standard library is imported. Checks of arrays are in `jaxblt.array_checks`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

MOST = 2**31 - 1
"""Whole numbers reach no further: counters, lengths and ids are int32 on the devices."""
MOST_SEED = 2**32 - 1

_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    bytes: "bytes",
    type(None): "None",
}


def whole(name: str, value: Any, *, least: int | None = None, most: int = MOST, why: str = "") -> None:
    """Raises ValueError, with name, value and what is expected, unless `value` is an int in least..most."""
    if not _fits(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}{why}")
    _check_limits(name, value, {"least": least, "most": most}, {}, why)


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    why: str = "",
) -> None:
    """Raises ValueError, with name, value and what is expected, unless `value` is a finite number in the bounds."""
    if not _fits(value, float):
        raise ValueError(f"{name} must be a finite number, got {value!r}{why}")
    _check_limits(name, value, {"least": least, "above": above, "most": most, "below": below}, {}, why)


def check_fields(config: Any) -> None:
    """Raises ValueError unless each field of a dataclass holds what its annotation says.

    A bool is no number, a float is no whole number, and NaN and infinity are no numbers. `Any` allows everything.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            raise ValueError(f"{_where(config, name)} must be {_described(hint)}, got {value!r}")


def check_bounds(
    config: Any,
    *names: str,
    least: float | None = None,
    most: float | str | None = None,
    above: float | None = None,
    below: float | str | None = None,
    why: str = "",
) -> None:
    """Raises ValueError unless the named fields lie in the bounds; None passes, and of a tuple each item counts.

    Call `check_fields` first. Whole numbers are at most `MOST` where no upper bound is given.

    Args:
      config: a dataclass.
      names: of its fields.
      least, most: bounds that are allowed; a text names the field that is the bound.
      above, below: bounds that are not.
      why: put behind the message.
    """
    given = {"least": least, "above": above, "most": most, "below": below}
    limits = {
        word: getattr(config, bound) if isinstance(bound, str) else bound for word, bound in given.items()
    }
    shown = {word: f"{bound} = {limits[word]}" for word, bound in given.items() if isinstance(bound, str)}
    for name in names:
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            unbounded = most is None and below is None and isinstance(item, int)
            top = {"most": MOST} if unbounded else {}
            _check_limits(_where(config, name), item, limits | top, shown, why)


def check_read(config: Any, part: str, name: str, *, needed: str, is_read: bool) -> None:
    """Raises ValueError for a field that was set although nothing reads it: what it asks for would not be done.

    Args:
      config: a dataclass.
      part: of a recipe that it is, for the message.
      name: of its field.
      needed: with what the field is read.
      is_read: whether it is.
    """
    value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
    if value != default and not is_read:
        raise ValueError(
            f"{part}.{name} = {value!r} is read with {needed} only, and nothing would come of it: set that, or leave "
            f"it {default!r}"
        )


def check_buildable(config: Any, name: str) -> None:
    """Raises ValueError unless the named field holds a config that builds a module: `causal` and `build()`."""
    value = getattr(config, name)
    is_config = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not (is_config and hasattr(value, "causal") and callable(getattr(value, "build", None))):
        raise ValueError(
            f"{_where(config, name)} must be a config with `causal` and `build()`, such as ByteLMConfig, got {value!r}"
        )


def _where(config: Any, name: str) -> str:
    return f"{type(config).__name__}.{name}"


def _check_limits(
    name: str, value: float, limits: Mapping[str, float | None], shown: Mapping[str, str], why: str
) -> None:
    """Raises ValueError unless `value` lies in the limits, which the message writes as `shown` where they are there."""
    broken = [word for word, bound in limits.items() if bound is not None and _breaks(value, word, bound)]
    if broken:
        # Keep the end of int32 out of a message about 0.
        used = {
            word: str(shown.get(word, bound))
            for word, bound in limits.items()
            if bound is not None and (bound != MOST or word in broken)
        }
        raise ValueError(f"{name} must {_told(used)}, got {value!r}{why}")


def _breaks(value: float, word: str, bound: float) -> bool:
    return {"least": value < bound, "above": value <= bound, "most": value > bound, "below": value >= bound}[
        word
    ]


def _told(limits: dict[str, str]) -> str:
    if limits.keys() == {"least", "most"}:
        return f"lie in {limits['least']}..{limits['most']}"
    words = {"least": "at least", "above": ">", "most": "at most", "below": "<"}
    return "be " + " and ".join(f"{words[word]} {bound}" for word, bound in limits.items())


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        items = [parts[0]] * len(value) if parts[1:] == (...,) else list(parts)
        return len(value) == len(items) and all(map(_fits, value, items))
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return type(value) in (int, float) and _is_finite(value)
    if hint in _WORDS:
        return type(value) is hint
    return isinstance(value, hint)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def _described(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_described, parts))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin is tuple and parts[1:] == (...,):
        return f"a tuple of which each item is {_described(parts[0])}"
    if origin is tuple:
        return f"a tuple ({', '.join(map(_described, parts))})"
    return _WORDS.get(hint) or f"a {getattr(hint, '__name__', hint)}"
