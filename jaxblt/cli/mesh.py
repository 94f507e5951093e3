"""The one way to write a mesh on a command line: --mesh seq=8,data=2."""

from collections.abc import Sequence
from dataclasses import replace

from jaxblt.parallel.mesh import AXES, MeshConfig

ONE = MeshConfig(data=1)
"""All axes of size 1."""


def parse_mesh(text: str, base: MeshConfig = ONE) -> MeshConfig:
    """Read "data=2,seq=4" as a mesh; axes that are not named have the sizes of `base`.

    Raises:
      ValueError: an axis is unknown or comes twice, or a size is no positive number.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1:
            raise ValueError(f"--mesh {text!r}: {part!r} is not AXIS=SIZE with an axis of {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"--mesh {text!r}: {axis} comes twice")
        sizes[axis] = int(size)
    return replace(base, **sizes)


def asked_mesh(text: str | None) -> MeshConfig | None:
    """Return the mesh of --mesh, in which the devices left share the rows; None for one device.

    Raises:
      ValueError: as of `parse_mesh`.
    """
    return None if text is None else parse_mesh(text, MeshConfig())


def without_free_axis(mesh: MeshConfig) -> MeshConfig:
    """Return the mesh with size 1 for an axis that takes the devices left.

    For places where no devices are given.
    """
    return replace(mesh, **{axis: max(getattr(mesh, axis), 1) for axis in AXES})


def expand_mesh(argv: Sequence[str]) -> list[str]:
    """Spell --mesh seq=8,data=2 in `argv` as a recipe's options: --mesh.seq 8 --mesh.data 2.

    Raises:
      ValueError: as of `parse_mesh`, or no sizes follow.
    """
    found: list[str] = []
    left = list(argv)
    while left:
        option = left.pop(0)
        if option != "--mesh" and not option.startswith("--mesh="):
            found.append(option)
            continue
        if option == "--mesh" and (not left or left[0].startswith("--")):
            raise ValueError("--mesh: expected sizes of mesh axes such as seq=8,data=2, got none")
        text = left.pop(0) if option == "--mesh" else option.removeprefix("--mesh=")
        parse_mesh(text)
        for part in filter(None, text.split(",")):
            axis, _, size = part.partition("=")
            found += [f"--mesh.{axis}", size]
    return found
