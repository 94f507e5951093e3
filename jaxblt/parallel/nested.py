"""Islands inside a `shard_map` of the caller's, with gradients.

With `check_vma`, JAX 0.11.2 makes a gradient of a `shard_map` inside another that does not compile: the inner one's
residuals are split over the outer axes once more. So these islands are opaque to JAX. Each is one operation, and its
backward pass is another one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from pallas_kernels.runtime import OwnGradient


def derived_inside(
    fn: Callable[..., Any], in_specs: Any, out_specs: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return `jax.shard_map(fn, ...)` whose backward pass runs `fn` again.

    It has no second derivatives.
    """

    def island(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        specs = _by_kind(jax.tree.leaves(_for_each(in_specs, args)), floats)

        def run(moved: list[Any], others: list[Any]) -> Any:
            parts = iter(moved), iter(others)
            return fn(*jax.tree.unflatten(tree, [next(parts[0] if yes else parts[1]) for yes in floats]))

        def forward(*parts: Any) -> Any:
            return _as_one(jax.shard_map(run, in_specs=specs, out_specs=out_specs, **options), *parts)

        def backward(kept: Any, dy: Any) -> tuple[Any, None]:
            pairs = zip(jax.tree.leaves(_for_each(out_specs, dy)), jax.tree.leaves(dy), strict=True)
            given = [(spec, d) for spec, d in pairs if d.dtype != jax.dtypes.float0]

            def pull(moved: list[Any], others: list[Any], dy: list[Any]) -> list[Any]:
                return jax.vjp(lambda moved: _floats(run(moved, others)), moved)[1](dy)[0]

            shapes = (*specs, [spec for spec, _ in given])
            back = jax.shard_map(pull, in_specs=shapes, out_specs=specs[0], **options)
            return _as_one(back, *kept, [d for _, d in given]), None

        derived = OwnGradient(forward)
        derived.defvjp(lambda *parts: (forward(*parts), parts), backward)
        return derived(*_by_kind(leaves, floats))

    return island


def _for_each(specs: Any, tree: Any) -> Any:
    """Return a spec for each leaf, from a prefix of the tree."""
    return jax.tree.broadcast(specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _by_kind(items: list[Any], floats: list[bool]) -> tuple[list[Any], list[Any]]:
    """Split the items into those of floats, and the others."""
    pairs = list(zip(items, floats, strict=True))
    return [x for x, yes in pairs if yes], [x for x, yes in pairs if not yes]


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _as_one(fn: Callable[..., Any], *args: Any) -> Any:
    """Return `fn(*args)` as one operation."""
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), _island.bind(*jax.tree.leaves(args), jaxpr=jaxpr))


_island = Primitive("nested_island")
_island.multiple_results = True


@_island.def_impl
def _run(*args: Any, jaxpr: Any) -> Any:
    return jax.jit(jaxpr_as_fun(jaxpr))(*args)


def _batched(args: Any, dims: Any, *, jaxpr: Any) -> Any:
    results = _as_one(jax.vmap(jaxpr_as_fun(jaxpr), in_axes=tuple(dims)), *args)
    return results, [0] * len(results)


_island.def_effectful_abstract_eval(lambda *_, jaxpr: (jaxpr.out_avals, jaxpr.effects))
batching.primitive_batchers[_island] = _batched
mlir.register_lowering(
    _island, lambda ctx, *args, jaxpr: mlir.core_call_lowering(ctx, *args, name="island", call_jaxpr=jaxpr)
)
