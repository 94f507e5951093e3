"""Islands: parts of a jitted program that run on each device's own rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

BATCH_AXES = ("data", "fsdp")


def batch_axes() -> tuple[str, ...]:
    """The axes of the mesh in force that split the batch; empty without a mesh, or inside an island."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes)
    return tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1 and axis not in manual)


def over_batch[T](fn: Callable[[Any, Any], T], batched: Any, shared: Any = ()) -> T:
    """`fn(batched, shared)`, each device on its own rows of `batched`.

    FFTs, custom calls and kernels know nothing of meshes, and the partitioner may gather the whole batch for them.
    Inside an island they see local arrays only.

    Args:
      fn: returns arrays whose leading axis is the batch.
      batched: pytree of arrays with a leading batch axis.
      shared: pytree of arrays every device has whole (filters, parameters).

    Raises:
      ValueError: the batch does not divide among the devices.
    """
    axes = batch_axes()
    if not axes:
        return fn(batched, shared)
    mesh = jax.sharding.get_abstract_mesh()
    check_rows(batched, axes)
    split, whole = PartitionSpec(axes), PartitionSpec()
    return jax.shard_map(
        fn, mesh=mesh, in_specs=(split, whole), out_specs=split, axis_names=manual_axes(axes), check_vma=True
    )(batched, shared)


def check_rows(batched: Any, axes: tuple[str, ...]) -> None:
    """Raises ValueError, naming the rows and the devices, unless leading axes divide among mesh axes `axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in axes)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batched)}
    if any(n % count for n in rows):
        raise ValueError(
            f"{sorted(rows)} rows do not divide among {count} devices (mesh axes {axes}): "
            "use a batch that is a multiple, or a smaller mesh"
        )


def manual_axes(axes: Sequence[str]) -> set[str]:
    """`axes` and the mesh's axes of one device: cuDNN's calls only compile where no axis is left to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    idle = {axis for axis in mesh.axis_names if mesh.shape[axis] == 1}
    return {*axes, *idle} - set(mesh.manual_axes)
