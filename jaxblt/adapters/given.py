"""Codes from elsewhere than the router: labels, an oracle, a guard that falls back. The program stays one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from jaxblt.adapters.router import Router

Code = Float[Array, "B T E"]


def given(code: Code) -> AbstractContextManager[Any]:
    """A context in which modules take this code and no router runs, nor has parameters or a state.

    It acts while a function is traced: enter it inside the function that is compiled. A program that is compiled
    already, such as those of `jaxblt.inference.generate`, does not see it; `jaxblt.adapters.chosen` is for these.

    Args:
      code: one number a block of ranks for each token, such as one-hot rows that pick an expert of a bank.
    """
    return nn.intercept_methods(
        lambda call, args, options, context: (code, None) if _is_router(context) else call(*args, **options)
    )


def through(change: Callable[[Code], Code]) -> AbstractContextManager[Any]:
    """A context in which the code of every router passes through `change` before the adapters see it.

    Routers run, so their states stay those of the tokens that were read. Enter it inside the function that is compiled.

    Args:
      change: from code to code, of one shape.
    """

    def intercept(call: Callable[..., Any], args: Any, options: Any, context: Any) -> Any:
        if not _is_router(context):
            return call(*args, **options)
        code, state = call(*args, **options)
        return change(code), state

    return nn.intercept_methods(intercept)


def _is_router(context: Any) -> bool:
    return isinstance(context.module, Router) and context.method_name == "__call__"
