"""Checks of values: configs when they are made, and numbers that public functions are given.

Below all rooms: only the standard library is imported. Checks of arrays are in `jaxblt.array_checks`.
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
"""Whole numbers reach no further: counters, lengths and ids are int32 on the devices."""
MOST_SEED = 2**32 - 1
LEAST_FLOAT, MOST_FLOAT = 1.2e-38, 3.4e38
"""Sizes of numbers that devices hold in fp32: larger ones become infinite there, and smaller ones 0."""

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


def perhaps(given: str, known: Iterable[str]) -> str:
    """Return " (perhaps NAME)" with the known name that `given` is close to, or nothing."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (perhaps {near[0]})" if near else ""


def check_fields(config: Any) -> None:
    """Check that each field of a dataclass holds what its annotation says.

    A bool is no number, a float is no whole number, and NaN and infinity are no numbers, nor are those that fp32 makes
    infinite or 0. Text is not empty, unless a field is so by default. `Any` allows everything.

    Raises:
      ValueError: the first field that does not, with its value and what is expected.
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
    """Raise ValueError unless the named fields lie in the bounds.

    None passes. Of a tuple each item counts. Call `check_fields` first. Whole numbers are at most `MOST` where no upper
    bound is given.

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


def check_read(config: Any, name: str, *, needed: str, is_read: bool, part: str | None = None) -> None:
    """Check that a field has its default unless something reads it: it would have no effect.

    Inside `forgiving` such a field is set back instead, which changes nothing that is computed.

    Args:
      config: a dataclass.
      name: of its field.
      needed: with what the field is read.
      is_read: whether it is.
      part: of a recipe that the config is, for the message; the name of its class if None.

    Raises:
      ValueError: the field was set, and nothing reads it.
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
    """Reset fields that nothing reads, inside the block: files of older versions may hold any."""
    token = _FORGIVING.set(True)
    try:
        yield
    finally:
        _FORGIVING.reset(token)


def check_buildable(config: Any, name: str) -> None:
    """Check that the named field holds a config that builds a module: `causal` and `build()`."""
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
    """Raise ValueError unless `value` lies in the limits.

    The message writes the limits as `shown`, if that is given.
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
    """Return what to say of a number that is finite, but not in fp32."""
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
