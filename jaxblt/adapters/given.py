"""Codes from elsewhere than the router: labels, an oracle. The program stays one."""

from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from jaxblt.adapters.router import Router

Code = Float[Array, "B T E"]


def given(code: Code) -> AbstractContextManager[Any]:
    """A context in which modules take this code and no router runs or has parameters; a router's state stays as it is.

    Where each block has a router, all of them have this code.

    It acts while a function is traced: enter it inside the function that is compiled. A program that is compiled
    already, such as those of `jaxblt.inference.generate`, does not see it; `jaxblt.adapters.chosen` is for these.

    Args:
      code: one number a block of ranks for each token, such as one-hot rows that pick an expert of a bank.
    """
    return nn.intercept_methods(
        lambda call, args, options, context: (
            (code, options.get("state")) if is_router(context) else call(*args, **options)
        )
    )


def is_router(context: Any) -> bool:
    """Whether an interceptor of Flax stands around a router's call."""
    return isinstance(context.module, Router) and context.method_name == "__call__"
