"""Functions whose gradient is written by hand: `jax.custom_vjp`, with a clear error and right second derivatives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels._compat import same_value


class OwnGradient:
    """A function with a backward pass of its own: `jax.custom_vjp` for positional arguments, mended in two places.

    - Forward mode raises one line that names `reference_ops`. JAX's own names no way out.
    - A gradient of its gradient is right in a scan. There JAX 0.11.2 takes other arrays for the arguments that the
      forward pass kept, and returns wrong numbers where the shapes allow it (see `same_value`).

    Args:
      fn: the function.
      nondiff_argnums: places of the arguments that are no arrays, as of `jax.custom_vjp`.
    """

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, fn)
        self._static = tuple(nondiff_argnums)

        def primal(*args: Any) -> Any:
            return fn(*args[:-1])

        primal.__name__ = fn.__name__
        self._guarded = jax.custom_vjp(primal, nondiff_argnums=self._static)

    def defvjp(self, forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any]) -> None:
        """Set forward(*args) -> (y, kept) and backward(*static, kept, dy) -> gradients.

        Gradients are by the other arguments.
        """

        def keep(*args: Any) -> tuple[Any, Any]:
            y, kept = forward(*args[:-1])
            return y, jax.tree.map(same_value, kept)

        self._guarded.defvjp(keep, lambda *args: (*backward(*args), None))

    def __call__(self, *args: Any) -> Any:
        arrays = jax.tree.leaves([arg for i, arg in enumerate(args) if i not in self._static])
        floats = [x for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        return self._guarded(*args, _guard.bind(*floats, name=self.__module__))


def _refuse(name: str) -> NoReturn:
    raise TypeError(
        f"forward-mode derivatives (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian) do not pass {name}, which has a "
        "backward pass alone: trace inside `with jaxblt.reference_ops():`, and leave `implementation` None"
    )


def _scalar(*_: Any, **__: Any) -> Any:
    return jax.typeof(np.float32(0))


_guard = Primitive("own_gradient")
"""0, whose tangent is `_tangent` of the arguments' tangents."""
_guard.def_impl(lambda *_, **__: jnp.zeros((), jnp.float32))
_guard.def_abstract_eval(_scalar)
mlir.register_lowering(_guard, mlir.lower_fun(_guard.impl, multiple_results=False))
batching.primitive_batchers[_guard] = lambda args, _, **params: (_guard.bind(*args, **params), None)

_tangent = Primitive("tangent_of_own_gradient")
"""The primitive that reverse mode transposes, to nothing. Forward mode computes it, or a batch of it, which raises."""
_tangent.def_impl(lambda *_, name: _refuse(name))
_tangent.def_abstract_eval(_scalar)
mlir.register_lowering(_tangent, lambda ctx, *_, name: _refuse(name))
batching.primitive_batchers[_tangent] = lambda args, _, *, name: _refuse(name)
ad.primitive_jvps[_tangent] = lambda primals, tangents, *, name: _refuse(name)
ad.primitive_transposes[_tangent] = lambda _, *tangents, name: [None] * len(tangents)


def _guard_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, name: str) -> tuple[Any, Any]:
    moved = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    return _guard.bind(*primals, name=name), _tangent.bind(*moved, name=name)


ad.primitive_jvps[_guard] = _guard_jvp
