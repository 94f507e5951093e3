"""The device mesh: four named axes, whatever the number of devices."""

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jaxblt.validation import check_bounds, check_fields, check_kind

AXES = ("data", "fsdp", "seq", "tensor")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; at most one is -1 and takes the devices that the others leave.

    Attributes:
      data: rows of the batch, parameters replicated.
      fsdp: rows of the batch, parameters and optimiser state split.
      seq: positions of the sequence.
      tensor: heads and feed-forward columns.
    """

    data: int = -1
    fsdp: int = 1
    seq: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, *AXES, least=-1)
        _check_sizes(dataclasses.asdict(self))

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Build the mesh over `devices`, by default all of all processes."""
        devices = jax.devices() if devices is None else list(devices)
        sizes = _fill(dataclasses.asdict(self), len(devices))
        return jax.make_mesh(
            tuple(sizes.values()), AXES, devices=devices, axis_types=(AxisType.Auto,) * len(AXES)
        )


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    seq: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Make a mesh with axes data, fsdp, seq and tensor, all of type Auto.

    All are present; an unused one has size 1.

    Args:
      data: size of the axis; at most one of the four is -1, which fills the rest.
      fsdp: size of the axis.
      seq: size of the axis.
      tensor: size of the axis.
      devices: by default all devices of all processes.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    return MeshConfig(data=data, fsdp=fsdp, seq=seq, tensor=tensor).build(devices)


def built_mesh(mesh: MeshConfig | Mesh) -> Mesh:
    """Return a mesh as it is, and that of a config over all devices.

    Raises:
      TypeError: it is neither.
      ValueError: the config does not suit the number of devices, or the mesh has other axes.
    """
    check_kind("mesh", mesh, MeshConfig, Mesh, fix="make one by jaxblt.parallel.make_mesh(data=2, seq=4)")
    found = mesh.build() if isinstance(mesh, MeshConfig) else mesh
    if set(found.axis_names) != set(AXES):
        raise ValueError(
            f"the mesh has axes {', '.join(found.axis_names)}, expected {', '.join(AXES)}: make it with "
            "jaxblt.parallel.make_mesh"
        )
    return found


def _check_sizes(sizes: dict[str, int]) -> None:
    if any(size != -1 and size < 1 for size in sizes.values()):
        raise ValueError(f"mesh {_shown(sizes)}: a size is at least 1, or -1 for what the others leave")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh {_shown(sizes)}: only one of {' and '.join(free)} can be -1")


def _shown(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())


def _fill(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Replace -1 among the sizes, so that their product is the number of devices."""
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and count % fixed == 0:
        return {**sizes, free[0]: count // fixed}
    if fixed != count:
        fix = (
            f"sizes whose product divides {count}" if free else f"{count} devices' worth, or -1 for one axis"
        )
        raise ValueError(
            f"mesh {_shown(sizes)}: the sizes given multiply to {fixed}, there are {count} devices; use {fix}"
        )
    return sizes


def off_mesh() -> AbstractContextManager[Any]:
    """Return a context in which no mesh is in force.

    Modules take their local paths, to count or to get shapes.
    """
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
