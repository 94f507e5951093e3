"""Codes from elsewhere than the router: labels, an oracle. The program stays one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from jaxblt.adapters.code.router import Router

Code = Float[Array, "B T E"]
_entered: ContextVar[str | None] = ContextVar("entered", default=None)


def override_codes(code: Code) -> AbstractContextManager[Any]:
    """Make a context in which modules take this code, and no router runs or has parameters.

    Where each block has a router, all of them have this code. A router's state stays as it is.

    It acts while a function is traced: enter it inside the function that is compiled. `jaxblt.inference.generate` and
    `jaxblt.answers`, whose programs serve later calls too, refuse inside; `update.row_adapters` is for `generate`.

    Args:
      code: one number a block of ranks for each token, such as one-hot rows that pick an expert of a bank.
    """
    return intercepted(
        "override_codes",
        lambda call, args, options, context: (
            (code, options.get("state")) if is_router(context) else call(*args, **options)
        ),
    )


@contextmanager
def intercepted(name: str, intercept: Callable[..., Any]) -> Iterator[None]:
    """Make the context `name`, in which an interceptor of Flax stands around calls, and `refuse_inside` raises."""
    token = _entered.set(name)
    try:
        with nn.intercept_methods(intercept):
            yield
    finally:
        _entered.reset(token)


def refuse_inside(what: str, fix: str) -> None:
    """Raise ValueError inside `override_codes` and `guarded`: compiled programs would keep the codes."""
    if name := _entered.get():
        raise ValueError(
            f"{what} was called inside {name}(...), and its compiled programs serve later calls too, which would have "
            f"the codes of this context: {fix}"
        )


def is_router(context: Any) -> bool:
    """Return whether an interceptor of Flax stands around a router's call."""
    return isinstance(context.module, Router) and context.method_name == "__call__"
