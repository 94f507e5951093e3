"""What every operation refuses before it looks at shapes: lists for arrays, fractions for whole numbers."""

import functools
import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from jaxtyping import AbstractArray


def checked[**P, R](operation: Callable[P, R]) -> Callable[P, R]:
    """The operation, with a TypeError that names the argument where its annotation says array or int and it is neither.

    What stands in an annotation beside an array, such as None or a tuple of arrays, is let through.
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
    """The check of a parameter with this annotation, or None."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if any(isinstance(choice, type) and issubclass(choice, AbstractArray) for choice in choices):
        others = tuple(kind for kind in (tuple, type(None)) if kind in map(_plain, choices))
        return functools.partial(_check_array, others)
    if annotation is int:
        return _check_whole
    return None


def _plain(choice: Any) -> Any:
    return get_origin(choice) or choice


def _check_array(others: tuple[type, ...], op: str, name: str, value: Any) -> None:
    if isinstance(value, others) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        return
    if value is None:
        raise TypeError(f"{op}: {name} must be an array, got None: it cannot be left out")
    raise TypeError(f"{op}: {name} must be an array, got {type(value).__name__}: make it by jnp.asarray")


def _check_whole(op: str, name: str, value: Any) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be a whole number, got {value!r}")
