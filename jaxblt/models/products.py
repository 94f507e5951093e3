"""The products of a model that compute in a dtype, and so round their kernels to it."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxblt.layers import Linear


def products_in[T](dtype: Any, trace: Callable[[], T]) -> tuple[set[str], T]:
    """Return paths of the `Linear`s that a trace computes in `dtype`, and the trace's result.

    A `Linear` counts if it casts its kernel to `dtype`.
    """
    found = set()

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Linear) and jnp.dtype(module.dtype) == jnp.dtype(dtype):
            found.add("/".join(module.path))
        return call(*args, **options)

    with nn.intercept_methods(record):
        result = trace()
    return found, result
