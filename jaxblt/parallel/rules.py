"""The mesh axis that splits each axis of a parameter: rules by logical name, and the table they give."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.parallel.islands import BATCH_AXES

Rules = Mapping[str, str | tuple[str, ...] | None]

DEFAULT_RULES: Rules = {
    "batch": BATCH_AXES,
    "seq": "seq",
    "embed": "fsdp",
    "latent": "fsdp",
    "hash": "fsdp",
    "mlp": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "vocab": None,
    "head_dim": None,
    "channels": None,
    "modes": None,
    "taps": None,
    "features": None,
    "layers": None,
    "norm": None,
    "rank": None,
}
"""Mesh axes by logical axis of a parameter; None is not split."""


class Placement(NamedTuple):
    """The place of one array.

    Attributes:
      shape, dtype: of the whole array.
      spec: mesh axes by array axis.
      notes: mesh axes that a rule asked for and that were left out, and why.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    notes: tuple[str, ...]


def axes_of(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of a rule or of an entry of a spec as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def place(
    name: str,
    shape: tuple[int, ...],
    logical: tuple[str | None, ...],
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
) -> tuple[PartitionSpec, tuple[str, ...]]:
    """Return the spec of an array whose axes are called `logical`, and the mesh axes that had to be left out.

    A mesh axis is left out where it does not divide the dimension, or splits an earlier axis of the array.

    Raises:
      ValueError: an axis has no rule, the mesh lacks an axis of a rule, or the names do not match the rank.
    """
    if len(logical) != len(shape):
        raise ValueError(f"{name}: {len(shape)} dimensions {shape} but {len(logical)} axis names {logical}")
    taken: set[str] = set()
    entries: list[tuple[str, ...] | None] = []
    notes: list[str] = []
    for size, axis in zip(shape, logical, strict=True):
        if axis is not None and axis not in rules:
            raise ValueError(
                f"{name}: no rule for its axis {axis!r}; known: {sorted(rules)}. Add one to the rules"
            )
        kept: list[str] = []
        for mesh_axis in axes_of(rules[axis]) if axis is not None else ():
            if mesh_axis not in mesh.shape:
                raise ValueError(f"{name}: {axis!r} goes to {mesh_axis!r}, the mesh has {tuple(mesh.shape)}")
            parts = mesh.shape[mesh_axis]
            if parts == 1:
                continue
            if mesh_axis in taken:
                notes.append(f"{axis}: {mesh_axis} in use")
            elif size % (parts * math.prod(mesh.shape[other] for other in kept)):
                notes.append(f"{axis}: {size} not divisible by {mesh_axis}={parts}")
            else:
                kept.append(mesh_axis)
        taken.update(kept)
        entries.append(tuple(kept) or None)
    return PartitionSpec(*(e[0] if e is not None and len(e) == 1 else e for e in entries)), tuple(notes)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def placements(boxed: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> dict[str, Placement]:
    """Return a placement for every parameter of `boxed`, by path.

    `module.init` or its `eval_shape` gives `boxed`. Parameters without logical names are replicated.
    """
    found = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(boxed, is_leaf=_is_box)
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        value = leaf.unbox() if isinstance(leaf, nn.meta.AxisMetadata) else leaf
        logical = leaf.names if isinstance(leaf, nn.Partitioned) else (None,) * len(value.shape)
        spec, notes = place(name, tuple(value.shape), tuple(logical), mesh, rules)
        found[name] = Placement(tuple(value.shape), np.dtype(value.dtype), spec, notes)
    return found


def param_shardings(boxed: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Return the shardings of the parameters in `boxed`, as a tree like the unboxed parameters."""
    shardings = [NamedSharding(mesh, found.spec) for found in placements(boxed, mesh, rules).values()]
    return jax.tree.unflatten(jax.tree.structure(nn.meta.unbox(boxed)), shardings)


def state_shardings(state: Any, boxed: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """Return shardings for all of `state`.

    What mirrors a parameter is placed with it, the rest is replicated. An array mirrors a parameter if its path ends in
    the parameter's and the shapes are the same. Moments and averages of any optimiser do, counters do not.

    Args:
      state: abstract (or real) pytree without boxes, such as an optimiser state or a whole train state.
      boxed: the abstract parameters with their logical axis names.
    """
    known = placements(boxed, mesh, rules)

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        for start in range(len(parts)):
            match = known.get("/".join(parts[start:]))
            if match is not None and match.shape == tuple(leaf.shape):
                return NamedSharding(mesh, match.spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays `[B, T, ...]`: rows over data and fsdp, positions over seq."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "seq"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding that puts the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def bytes_per_device(placement: Placement, mesh: Mesh) -> int:
    """Return how many bytes of an array each device holds."""
    parts = math.prod(mesh.shape[axis] for entry in placement.spec for axis in axes_of(entry))
    return math.prod(placement.shape) * placement.dtype.itemsize // parts


def sharding_table(boxed: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> str:
    """Write parameter, shape, spec and bytes per device, one line each, for printing.

    It also names mesh axes that had to be left out.
    """
    found = placements(boxed, mesh, rules)
    rows = [("parameter", "shape", "spec", "bytes/device", "")]
    for name, placement in found.items():
        shown = ", ".join("-" if e is None else "+".join(axes_of(e)) for e in placement.spec)
        held = f"{bytes_per_device(placement, mesh):,}"
        rows.append((name, str(placement.shape), f"({shown})", held, "; ".join(placement.notes)))
    total = sum(bytes_per_device(placement, mesh) for placement in found.values())
    rows.append(("total", "", str(dict(mesh.shape)), f"{total:,}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in rows
    )
