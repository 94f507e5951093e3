"""Islands inside a `shard_map` of the caller's, with gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.runtime import OwnGradient


def derived_inside(
    fn: Callable[..., Any], in_specs: Any, out_specs: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """Return `jax.shard_map(fn, ...)` whose backward pass is a `shard_map` too, and runs `fn` again.

    JAX 0.11.2 derives one that lies in another to a program that does not compile: what the forward pass keeps is split
    over the outer axes once more, if `check_vma` tracks them.
    """

    def island(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        specs = [*_by_kind(jax.tree.leaves(jax.tree.broadcast(in_specs, args, is_leaf=_is_spec)), floats)]

        def run(moved: list[Any], others: list[Any]) -> Any:
            parts = iter(moved), iter(others)
            return fn(*jax.tree.unflatten(tree, [next(parts[0] if yes else parts[1]) for yes in floats]))

        def backward(kept: Any, dy: Any) -> tuple[Any, None]:
            shared = jax.tree.broadcast(out_specs, dy, is_leaf=_is_spec)
            moved = [(spec, d) for spec, d in zip(jax.tree.leaves(shared), jax.tree.leaves(dy), strict=True)]
            moved = [(spec, d) for spec, d in moved if d.dtype != jax.dtypes.float0]

            def pull(moved: list[Any], others: list[Any], dy: list[Any]) -> list[Any]:
                return jax.vjp(lambda moved: _floats(run(moved, others)), moved)[1](dy)[0]

            given = (*specs, [spec for spec, _ in moved])
            back = jax.shard_map(pull, in_specs=given, out_specs=specs[0], **options)
            return back(*kept, [d for _, d in moved]), None

        forward = jax.shard_map(run, in_specs=tuple(specs), out_specs=out_specs, **options)
        derived = OwnGradient(forward)
        derived.defvjp(lambda *kept: (forward(*kept), kept), backward)
        return derived(*_by_kind(leaves, floats))

    return island


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _by_kind(items: list[Any], floats: list[bool]) -> tuple[list[Any], list[Any]]:
    """The items of floats, and the others."""
    pairs = list(zip(items, floats, strict=True))
    return [x for x, yes in pairs if yes], [x for x, yes in pairs if not yes]


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
