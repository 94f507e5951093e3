"""What depends on the version of JAX, here alone. Written for jax 0.11; 0.12 keeps these names."""

from typing import Any

import jax
from jax import lax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which x may differ between devices inside `shard_map`; empty outside of one."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, all marked as varying over every mesh axis that any of them varies over; None stays None.

    A `custom_vjp` needs it before its call inside `shard_map`: the cotangent of a weight that all devices
    share is made of local rows, and only the transpose of this cast sums it over the devices. A scan needs it
    for the first value of its carry.
    """
    axes: frozenset[str] = frozenset()
    for x in arrays:
        if x is not None:
            axes |= varying_axes(x)

    def cast(x: Any) -> Any:
        if x is None or not (missing := tuple(sorted(axes - varying_axes(x)))):
            return x
        return lax.pcast(x, missing, to="varying")

    return tuple(cast(x) for x in arrays)
