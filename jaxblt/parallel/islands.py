"""Islands: parts of a jitted program that run on each device's own rows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxblt.parallel.nested import derived_inside
from pallas_kernels.runtime import checks_varying, has_reference_ops

BATCH_AXES = ("data", "fsdp")
SEQ_AXIS = "seq"
TENSOR_AXIS = "tensor"


def batch_axes() -> tuple[str, ...]:
    """Return the axes of the mesh in force that split the batch.

    There are none without a mesh, or inside an island.
    """
    return tuple(axis for axis in BATCH_AXES if axis in open_axes())


def over_batch[T](fn: Callable[[Any, Any], T], batched: Any, shared: Any = (), *, heads: Any = False) -> T:
    """Return `fn(batched, shared)`, each device on its own rows of `batched`.

    FFTs, custom calls and kernels know nothing of meshes, and the partitioner may gather the whole batch for them.
    Inside an island they see local arrays only. The island leaves no axis of the mesh to the partitioner, because
    cuDNN's calls and Pallas' kernels would not compile. The exception is `seq`: rows are whole on its devices here.
    Therefore decoding over a mesh that splits both batch and sequence does not compile for GPUs.

    Args:
      fn: returns arrays whose leading axis is the batch.
      batched: pytree of arrays with a leading batch axis.
      shared: pytree of arrays that every device has whole (filters, parameters).
      heads: pytree prefix of `batched`, True for arrays [..., H, K]. If there are any, the result is such an array too,
        `shared` are arrays [H, ...], and all are split over `tensor` if it divides every H.

    Raises:
      ValueError: the batch does not divide among the devices.
    """
    axes, whole = batch_axes(), (SEQ_AXIS,) if SEQ_AXIS in open_axes() else ()
    if not axes and (whole or not open_axes()):
        return fn(batched, shared)
    check_rows(batched, axes)
    specs = placed((axes or None,), batched, heads)
    return island(fn, (specs.arrays, specs.shared), specs.result, apart=whole)(batched, shared)


def island[**P, T](
    fn: Callable[P, T], in_specs: Any, out_specs: Any, *, apart: tuple[str, ...] = ()
) -> Callable[P, T]:
    """Run `fn` on each device's share, manual in every axis of the mesh except those `apart`.

    Inside a caller's `shard_map` arrays are shares along its axes already, so those axes are left out of the specs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = set(mesh.axis_names).difference(mesh.manual_axes, apart)
    if not names:
        return fn
    in_specs, out_specs = _over(names, in_specs), _over(names, out_specs)
    options: dict[str, Any] = {"mesh": mesh, "axis_names": names, "check_vma": checks_varying()}
    if mesh.manual_axes and checks_varying() and not has_reference_ops():
        return derived_inside(fn, in_specs, out_specs, options)
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, **options)


def _over(names: set[str], specs: Any) -> Any:
    """Return the specs with only the mesh axes `names`."""

    def kept(entry: Any) -> Any:
        axes = tuple(axis for axis in ((entry,) if isinstance(entry, str) else entry or ()) if axis in names)
        return axes or None

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: PartitionSpec(*map(kept, spec)), specs, is_leaf=is_spec)


class Placed(NamedTuple):
    """Specs of an island's arrays, of `shared` arrays with a head axis, and of a result with the axes of `arrays`."""

    arrays: Any
    shared: PartitionSpec
    result: PartitionSpec


def placed(lead: tuple[Any, ...], arrays: Any, heads: Any) -> Placed:
    """Return specs of arrays that begin with the mesh axes `lead`.

    Arrays that `heads`, a prefix, calls [..., H, K] are split by head.
    """
    by_head: list[Array] = []
    jax.tree.map(lambda yes, x: by_head.extend(jax.tree.leaves(x)) if yes else None, heads, arrays)
    whole = PartitionSpec(*lead)
    if head_devices(*(x.shape[-2] for x in by_head)) == 1:
        return Placed(whole, PartitionSpec(), whole)

    def spec(x: Array) -> PartitionSpec:
        return PartitionSpec(*lead, *(None,) * (x.ndim - len(lead) - 2), TENSOR_AXIS, None)

    specs = jax.tree.map(lambda yes, x: jax.tree.map(spec, x) if yes else whole, heads, arrays)
    return Placed(specs, PartitionSpec(TENSOR_AXIS), spec(by_head[0]))


def core_specs(core: Any, axis: str) -> Any:
    """Return specs of the arrays of a mixer's core, a dataclass.

    Arrays that its `per_head` names, [H, ...], are split over `axis`.
    """
    arrays = [f.name for f in dataclasses.fields(core) if f.metadata.get("pytree_node", True)]
    per_head = getattr(core, "per_head", ())
    specs = {name: PartitionSpec(axis) if name in per_head else PartitionSpec() for name in arrays}
    return dataclasses.replace(core, **specs)


def head_devices(*counts: int) -> int:
    """Return the number of devices that an island splits heads among.

    It is that of `tensor` if it divides every count, else 1.
    """
    size = jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1)
    divides = bool(counts) and all(count % size == 0 for count in counts)
    return size if divides and TENSOR_AXIS in open_axes() else 1


def open_axes() -> tuple[str, ...]:
    """Return the mesh's axes of several devices, except those of a `shard_map` around this."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis not in mesh.manual_axes)


def check_rows(batched: Any, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless leading axes divide among mesh axes `axes`.

    The message names rows and devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    count = math.prod(mesh.shape[axis] for axis in axes)
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batched)}
    if any(n % count for n in rows):
        raise ValueError(
            f"{sorted(rows)} rows do not divide among {count} devices (mesh axes {axes}): "
            "use a batch that is a multiple, or a smaller mesh"
        )
