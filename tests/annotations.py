"""How annotations are checked while tests run: types by beartype, shapes and dtypes of arrays by jaxtyping.

jaxtyping's import hook decorates every function and class of the library. Its own decorator makes the checks when a
function is defined, which takes 2.4 ms, and again whenever a function around it is called. The one here makes them at
the first call, once for each place in the source.
"""

import abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

CONF = beartype.BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)
"""An int is a float."""

_CONTEXT = jaxtyping.jaxtyped("context")
_CLASSES = (type, abc.ABCMeta, enum.EnumType)
"""Kinds of classes; those of jaxtyping's arrays and trees are of other kinds."""
_OF_NESTED: dict[types.CodeType, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {}
"""By the code of a function inside another: the first such function, its checks, and the annotations they are of."""


def install(*packages: str) -> None:
    """Checks what is imported from these packages from now on."""
    jaxtyping.install_import_hook(packages, None)
    # Replace the decorator that the hook's modules look up
    jaxtyping.jaxtyped = lambda typechecker: checked


def checked(target: Any) -> Any:
    """The function or dataclass, refusing what its annotations forbid.

    Constructors that take arrays are left alone: JAX builds its pytrees again with shapes, shardings or stacked arrays
    in place of what their fields are annotated with. So are methods that return Self, which says nothing without the
    class.
    """
    if isinstance(target, type):
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = checked(target.__init__)
        return target
    hints = target.__annotations__.values()
    if (
        not hints
        or typing.Self in hints
        or (target.__name__ == "__init__" and any(map(_holds_arrays, hints)))
    ):
        return target
    return _checked_when_called(target)


def _checked_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    checks: Callable[..., Any] | None = None
    has_sizes = True

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checks, has_sizes
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if checks is None:
            checks = _with_checks(function)
            has_sizes = not all(map(_has_no_sizes, function.__annotations__.values()))
        if not has_sizes:
            return checks(*args, **kwargs)
        # the sizes of named axes are a call's own
        with _CONTEXT:
            return checks(*args, **kwargs)

    return call


def _with_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    if "<locals>" not in function.__qualname__ or function.__code__.co_filename == "<string>":
        return _made(function)
    hints = dict(function.__annotations__)
    if function.__code__ not in _OF_NESTED:
        _OF_NESTED[function.__code__] = function, (checks := _made(function)), hints
        return checks
    first, checks, of_first = _OF_NESTED[function.__code__]
    if hints != of_first:  # annotated by the function around it
        return _made(function)
    return function if checks is first else _rebound(checks, first, function)


def _made(function: Callable[..., Any]) -> Callable[..., Any]:
    hints = function.__annotations__
    function.__annotations__ = {name: _found(hint, function.__globals__) for name, hint in hints.items()}
    return beartype.beartype(conf=CONF)(function)


def _found(hint: Any, names: dict[str, Any]) -> Any:
    """The hint with its strings read; Any if one names what is imported for type checkers only."""
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["hint"]
    except NameError:
        return Any


def _rebound(checks: Any, first: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The checks of `first` around another function: beartype's wrapper holds what it calls as a default."""
    (name,) = (name for name, value in checks.__kwdefaults__.items() if value is first)
    twin = types.FunctionType(checks.__code__, checks.__globals__, checks.__name__, checks.__defaults__)
    twin.__kwdefaults__ = checks.__kwdefaults__ | {name: function}
    return twin


def _has_no_sizes(hint: Any) -> bool:
    """Whether no named axis can stand in the hint; False where that is not plain."""
    if hint is None or hint is Any or hint is ... or typing.get_origin(hint) is typing.Literal:
        return True
    if args := typing.get_args(hint):
        return all(map(_has_no_sizes, args))
    return type(hint) in _CLASSES


def _holds_arrays(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_holds_arrays, typing.get_args(hint)))
