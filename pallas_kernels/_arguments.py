"""The checks of every operation before shapes: no lists for arrays, 2.0 for 2, "yes" for True or NaN scales.

Values of arrays are checked behind their shapes (`_ranges.py`).
"""

import functools
import inspect
import math
from collections.abc import Callable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from jax.core import Tracer
from jaxtyping import AbstractArray


def checked[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """Return the operation with a TypeError for arguments unlike their annotations.

    An argument is an array, an int, a float or a bool. What stands in an annotation beside an array, such as None or a
    tuple of arrays, is let through. A ValueError names what is none of the words of a `Literal`, or no finite number.
    """
    signature = inspect.signature(operation)
    kinds = {name: _kind(parameter.annotation) for name, parameter in signature.parameters.items()}

    @functools.wraps(operation)
    def run(*args: P.args, **options: P.kwargs) -> R:
        given = signature.bind(*args, **options).arguments
        for name, value in given.items():
            if (check := kinds.get(name)) is not None:
                check(operation.__name__, name, value)
        return operation(*args, **options)

    return run


def _kind(annotation: Any) -> Callable[[str, str, Any], None] | None:
    """Return the check of a parameter with this annotation, or None."""
    if get_origin(annotation) is Literal:
        return functools.partial(_check_word, get_args(annotation))
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if any(isinstance(choice, type) and issubclass(choice, AbstractArray) for choice in choices):
        others = tuple(kind for kind in (tuple, type(None)) if kind in map(_plain, choices))
        return functools.partial(_check_array, others)
    if annotation is int:
        return _check_whole
    if float in choices:
        return functools.partial(_check_number, type(None) in choices)
    if annotation is bool:
        return _check_flag
    return None


def _plain(choice: Any) -> Any:
    return get_origin(choice) or choice


def _check_array(others: tuple[type, ...], op: str, name: str, value: Any) -> None:
    if isinstance(value, others) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        return
    if value is None:
        raise TypeError(f"{op}: {name} must be an array, got None: it cannot be left out")
    raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}: make it by jnp.asarray")


def _check_word(words: tuple[str, ...], op: str, name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{op}: {name} must be {' or '.join(map(repr, words))}, got {value!r}")


def _check_whole(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be a whole number, got {value!r}")


def _check_number(optional: bool, op: str, name: str, value: Any) -> None:
    # Leave arrays of one number to the op: they may be traced
    if (value is None and optional) or hasattr(value, "dtype"):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{op}: {name} must be finite, got {value!r}")


def _check_flag(op: str, name: str, value: Any) -> None:
    # Leave traced flags to JAX, whose errors say where a flag was traced
    if not isinstance(value, bool | np.bool_ | Tracer):
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}: pass a bool")
