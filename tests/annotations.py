"""How annotations are checked while tests run: types by beartype, shapes and dtypes of arrays by jaxtyping."""

import typing
from collections.abc import Callable
from typing import Any

import beartype
import jaxtyping

CONF = beartype.BeartypeConf(is_pep484_tower=True)
"""An int is a float."""


def checked[F: Callable[..., Any]](function: F) -> F:
    """The function, refusing what its annotations forbid.

    Constructors that take arrays are left alone: JAX builds its pytrees again with shapes, shardings or stacked arrays
    in place of what their fields are annotated with. So are methods that return Self, which says nothing without the
    class.
    """
    hints = getattr(function, "__annotations__", {}).values()
    if typing.Self in hints or (function.__name__ == "__init__" and any(map(_holds_arrays, hints))):
        return function
    return beartype.beartype(conf=CONF)(function)


def _holds_arrays(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_holds_arrays, typing.get_args(hint)))
