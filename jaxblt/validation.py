"""Checks of values: fields of configs when a config is made, and number arguments of public functions.

Every room imports this module, so it imports only the standard library. Checks of arrays are in `jaxblt.array_checks`.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

MOST = 2**31 - 1
"""The largest whole number that is allowed: counters, lengths and ids are int32 on the devices."""
MOST_SEED = 2**32 - 1
LEAST_FLOAT, MOST_FLOAT = 1.2e-38, 3.4e38
"""The smallest and the largest magnitude in fp32: larger numbers become infinite on a device, smaller ones 0."""

_FORGIVING: ContextVar[bool] = ContextVar("forgiving", default=False)
_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text that is not empty",
    bytes: "bytes",
    type(None): "None",
}


def whole(name: str, value: Any, *, least: int | None = None, most: int = MOST, why: str = "") -> None:
    """Raise ValueError unless `value` is an int in least..most.

    The message has the name, the value and what is expected.
    """
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
    """Raise ValueError unless `value` is a finite number in the bounds.

    The message has the name, the value and what is expected.
    """
    if not _fits(value, float):
        raise ValueError(f"{name} must be a finite number, got {value!r}{_fp32(value)}{why}")
    _check_limits(name, value, {"least": least, "above": above, "most": most, "below": below}, {}, why)


def check_kind(name: str, value: Any, *kinds: type, fix: str) -> None:
    """Raise TypeError unless `value` is of one of the kinds.

    The message has the name, the first line of the value, what is expected and how to get it.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: expected {wanted}, got {repr(value).partition('\n')[0]:.80}: {fix}")


def perhaps(given: str, known: Iterable[str]) -> str:
    """Return " (perhaps NAME)" with the known name closest to `given`, or "" if none is close."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (perhaps {near[0]})" if near else ""


def check_fields(config: Any) -> None:
    """Check that the value of each field of a dataclass fits the field's annotation.

    A bool does not pass as a number, nor a float as a whole number. NaN, infinity, and numbers that fp32 turns into
    infinity or 0 fail. Empty text fails, unless it is the field's default. `Any` allows everything.

    Raises:
      ValueError: names the first field that does not fit, its value and what was expected.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if "" == type(config).__dataclass_fields__[name].default == value:
            continue
        if not _fits(value, hint):
            raise ValueError(
                f"{_where(config, name)} must be {_described(hint)}, got {value!r}{_fp32(value)}"
            )


def check_bounds(
    config: Any,
    *names: str,
    least: float | None = None,
    most: float | str | None = None,
    above: float | None = None,
    below: float | str | None = None,
    why: str = "",
) -> None:
    """Raise ValueError unless the named fields lie within the bounds.

    None passes. In a tuple each item is checked. Without an upper bound whole numbers may be at most `MOST`. Call
    `check_fields` first.

    Args:
      config: a dataclass.
      names: names of its fields.
      least, most: inclusive bounds; a text is the name of the field that holds the bound.
      above, below: exclusive bounds.
      why: text appended to the message.
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


def check_read(config: Any, name: str, *, needed: str, is_read: bool, part: str | None = None) -> None:
    """Check that a field that nothing reads has its default, because another value would have no effect.

    Inside `forgiving` such a field is reset to its default instead of raising.

    Args:
      config: a dataclass.
      name: name of its field.
      needed: the setting with which the field is read, for the message.
      is_read: whether the field is read.
      part: name of the config in its recipe, for the message; the name of its class if None.

    Raises:
      ValueError: the field is not its default, and nothing reads it.
    """
    value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
    if is_read or value == default:
        return
    if _FORGIVING.get():
        object.__setattr__(config, name, default)
        return
    raise ValueError(
        f"{part or type(config).__name__}.{name} = {value!r} is read with {needed} only, and nothing would come of it: "
        f"set that, or leave it {default!r}"
    )


@contextmanager
def forgiving() -> Iterator[None]:
    """Reset fields that nothing reads, instead of raising, inside the block: older files may hold any value there."""
    token = _FORGIVING.set(True)
    try:
        yield
    finally:
        _FORGIVING.reset(token)


def check_buildable(config: Any, name: str) -> None:
    """Check that the named field holds a config that builds a module: it has `causal` and `build()`."""
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
    """Raise ValueError unless `value` lies within the limits.

    The message writes a limit as `shown` has it, if it has it.
    """
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
        return type(value) in (int, float) and (value == 0 or LEAST_FLOAT <= abs(value) <= MOST_FLOAT)
    if hint in _WORDS:
        return type(value) is hint and value != ""
    return isinstance(value, hint)


def _fp32(value: Any) -> str:
    """Return a note for a number that is finite in Python but not in fp32, or ""."""
    is_finite = type(value) is float and math.isfinite(value)
    return f", fp32 holds sizes of {LEAST_FLOAT:g} to {MOST_FLOAT:g}" if is_finite else ""


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
