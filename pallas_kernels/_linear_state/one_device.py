"""Calls inside `shard_map` of code that knows no mesh axes, such as jax-linear-attention's.

Its kernels return arrays that claim to be alike on all devices, and jax refuses those in a rule for gradients. Here the
code is traced on arrays of one device. The trace is one operation, whose results vary over the axes that its arguments
vary over. No operation of the trace is seen by jax's transformations: `custom_vjp` and a batching rule stand for them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive, Var, jaxpr_as_fun
from jax.interpreters import batching, mlir

from pallas_kernels._compat import typed_like, unmeshed, vary_alike
from pallas_kernels._own_gradient import OwnGradient


def on_one_device(fn: Callable[[Any, Any], Any], floats: Any, others: Any) -> Any:
    """Return `fn(floats, others)`, with gradients by the rules inside `fn`.

    `fn` must not talk to other devices.

    Args:
      fn: closes over no array.
      floats: pytree of arrays to differentiate by, with None for what is not given.
      others: pytree of integers.
    """
    leaves, structure = jax.tree.flatten((floats, others))
    # Cast outside of `_call`: the cast's transpose sums the gradient of what all devices share.
    return _call(fn, *jax.tree.unflatten(structure, vary_alike(*leaves)))


@partial(OwnGradient, nondiff_argnums=(0,))
def _call(fn: Callable[[Any, Any], Any], floats: Any, others: Any) -> Any:
    return _traced_alone(fn, floats, others)


def _forward(fn: Callable[[Any, Any], Any], floats: Any, others: Any) -> Any:
    return _traced_alone(lambda floats, others: jax.vjp(lambda x: fn(x, others), floats), floats, others)


def _backward(fn: Callable[[Any, Any], Any], pullback: Any, cotangents: Any) -> tuple[Any, None]:
    return *_traced_alone(lambda pullback, cotangents: pullback(cotangents), pullback, cotangents), None


_call.defvjp(_forward, _backward)


def _traced_alone(fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(*args)` as one operation on arrays that vary alike."""
    leaves, structure = jax.tree.flatten(args)
    found: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        results, tree = jax.tree.flatten(fn(*jax.tree.unflatten(structure, leaves)))
        found.append(tree)
        return results

    leaves = vary_alike(*leaves)
    with unmeshed():
        jaxpr = jax.make_jaxpr(flat)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))
    results = one_device_p.bind(*leaves, jaxpr=jaxpr)
    # Return an argument as itself: a scan would stack the copy that backward keeps beside the argument.
    given = dict(zip(jaxpr.jaxpr.invars, leaves, strict=True))
    sources = [given.get(v) if isinstance(v, Var) else None for v in jaxpr.jaxpr.outvars]
    kept = [r if s is None else s for r, s in zip(results, sources, strict=True)]
    return jax.tree.unflatten(found[0], kept)


one_device_p = Primitive("one_device")
one_device_p.multiple_results = True


@one_device_p.def_impl
def _run(*args: Any, jaxpr: Any) -> Any:
    return jax.jit(jaxpr_as_fun(jaxpr))(*args)


@one_device_p.def_effectful_abstract_eval
def _types(*args: Any, jaxpr: Any) -> Any:
    return [typed_like(args[0], aval.shape, aval.dtype) for aval in jaxpr.out_avals], jaxpr.effects


def _batched(args: Any, dims: Any, *, jaxpr: Any) -> Any:
    results = _traced_alone(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims)), *args)
    return results, [0] * len(results)


def _lowered(ctx: Any, *args: Any, jaxpr: Any) -> Any:
    return mlir.core_call_lowering(ctx, *args, name=one_device_p.name, call_jaxpr=jaxpr)


batching.primitive_batchers[one_device_p] = _batched
mlir.register_lowering(one_device_p, _lowered)
