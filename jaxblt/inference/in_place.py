"""Programs that take a place in generation and return the next one, in its memory and laid out as it was."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

IN_ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""Options of XLA that put loops into a program's CUDA graph, where kernels that wait for nothing run side by side.

Without `WHILE` the host waits for the device at each turn, and prepares nothing of the next call meanwhile. All other
parts XLA puts there by itself.
"""

ONE_LOOP_IN_ONE_GRAPH = {**IN_ONE_GRAPH, "xla_gpu_graph_min_graph_size": 1}
"""The same for a program that is little else than a loop: XLA makes no graph of fewer than five commands otherwise."""


def advancing[P](advance: Callable[..., tuple[P, Any]], place: P) -> Callable[..., tuple[P, Any]]:
    """Compile `advance` so that a place leaves it laid out over the devices as it came.

    XLA would choose another layout for it, and compile the next piece anew.

    Args:
      advance: (decoder, steps, params, requests, place, ...) -> (place, ...); the first two are static.
      place: as it is given first.
    """
    leaves, tree = jax.tree.flatten(place)
    return _compiled(advance, tree, tuple(leaf.sharding for leaf in leaves))


@cache
def _compiled(advance: Callable[..., Any], tree: Any, shardings: tuple[Any, ...]) -> Callable[..., Any]:
    several = any(len(sharding.device_set) > 1 for sharding in shardings)
    laid_out = (jax.tree.unflatten(tree, shardings), None) if several else None
    # Donate the place: the caches of a long document would be there twice.
    return jax.jit(
        advance,
        static_argnums=(0, 1),
        donate_argnums=4,
        out_shardings=laid_out,
        compiler_options=IN_ONE_GRAPH,
    )


Layout = tuple[Any, ...] | None
"""Shardings of the arrays of a tree, as a static argument of programs; None on one device."""


def layout_over_devices(tree: Any) -> Layout:
    """Return how the arrays of a tree lie on several devices."""
    shardings = tuple(leaf.sharding for leaf in jax.tree.leaves(tree))
    return shardings if any(len(sharding.device_set) > 1 for sharding in shardings) else None


def keep_layout[T](tree: T, layout: Layout) -> T:
    """Return the tree laid out so, inside a program: the next call would be compiled anew for another layout."""
    if layout is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.tree.unflatten(jax.tree.structure(tree), layout))
