"""How many matmul FLOPs a model spends on a byte, counted from its program, and how many parameters it has."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxblt.layers import StoredKernel
from jaxblt.training.optimisers.adamw import axis_names

HASH = "hash"

PEAK_FLOPS = {"H200": 790e12, "H100": 790e12, "A100": 312e12}
"""Dense bf16 matmul FLOP/s by device: what a vendor library reaches on Hopper (datasheet 989e12); A100 by datasheet."""


def peak_flops(device_kind: str) -> float | None:
    """Return matmul FLOP/s that a device of this kind can reach; None where we have no figure."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def count_params(boxed: Any) -> tuple[int, int]:
    """Count all parameters, and those outside hash tables, whose axis or path says "hash".

    Quantised kernels count as the weights that they stand for.
    """
    is_leaf = lambda x: hasattr(x, "unbox") or isinstance(x, StoredKernel)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_leaf)
    sizes = [(_count_one(leaf), _is_hash(path, leaf)) for path, leaf in leaves]
    return sum(n for n, _ in sizes), sum(n for n, hashed in sizes if not hashed)


def _count_one(leaf: Any) -> int:
    return leaf.size if isinstance(leaf, StoredKernel) else math.prod(jax.tree.leaves(leaf)[0].shape)


def _is_hash(path: tuple[Any, ...], leaf: Any) -> bool:
    names = () if isinstance(leaf, StoredKernel) else axis_names(leaf)
    return HASH in names or HASH in jax.tree_util.keystr(path)


def matmul_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Count the FLOPs of the matrix products in one call of `fn`: 2·m·n·k each, loops by their length.

    Args:
      fn: a function of arrays; only its program is looked at, nothing is run.
      args: arrays or ShapeDtypeStructs.
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def countable_device() -> Any:
    """Return the CPU, for which every op has a form made of products that `matmul_flops` can see.

    None where jax has no CPU: fused kernels go uncounted then.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _count(jaxpr: core.Jaxpr) -> float:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot_flops(equation)
    inner = [_count(jaxpr) for jaxpr in _inner(equation.params)]
    if name == "cond":
        return max(inner)
    times = 1
    if name == "scan":
        times = equation.params["length"]
    elif name == "shard_map":
        # the body is one device's share; devices along an axis that splits nothing do the same work
        entries = [entry for spec in equation.params["in_specs"] for entry in spec if entry is not None]
        axes = {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry)}
        times = math.prod(equation.params["mesh"].shape[axis] for axis in axes)
    return times * sum(inner)


def _dot_flops(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: Any = equation.invars[0].aval
    out: Any = equation.outvars[0].aval
    depth = math.prod(left.shape[axis] for axis in contracted)
    return 2.0 * depth * math.prod(out.shape)


def _inner(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """Yield the programs inside an equation: loop bodies, branches, checkpointed or differentiated functions."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item


def mfu(flops_per_byte: float, bytes_per_second: float, peak: float) -> float:
    """Return the share of `peak` (all devices together) that was spent on the model's own matmuls."""
    return flops_per_byte * bytes_per_second / peak


def as_shapes(tree: Any) -> Any:
    """Return shapes and dtypes of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)
