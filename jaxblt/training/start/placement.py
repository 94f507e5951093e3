"""A run on a mesh: where its parameters lie, and the rows that it reads."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxblt.data.batch import Batch
from jaxblt.parallel.distributed import local_rows
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout, layout_of
from jaxblt.parallel.mesh import MeshConfig, built_mesh, off_mesh
from jaxblt.parallel.rules import batch_sharding, replicated, state_shardings
from jaxblt.precision.weights import refuse_quantized
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import boxed_params, make_task, place_frozen, to_devices
from jaxblt.training.state import Frozen

SPLIT = "a mesh whose axes fsdp or tensor split weights"


def find_mesh(mesh: MeshConfig | Mesh | None) -> Mesh | None:
    """Return the mesh that is asked for, or else the one in force; None for one device.

    Raises:
      TypeError: it is no mesh.
      ValueError: the mesh has other axes, or not as many devices as there are.
    """
    found = jax.sharding.get_mesh() if mesh is None else mesh
    return None if isinstance(found, Mesh) and found.empty else built_mesh(found)


def place_params(
    recipe: Recipe, params: Any, frozen: Mapping[str, Frozen], mesh: Mesh
) -> tuple[Any, dict[str, Frozen]]:
    """Return a run's parameters and frozen trees as they lie on a mesh in training: split over `fsdp` and `tensor`.

    Args:
      recipe: of the run.
      params: of its model.
      frozen: other trees by name.
      mesh: of the devices.
    """
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return jax.device_put((params, dict(frozen)), replicated(mesh))
    refuse_quantized((params, dict(frozen)), SPLIT)
    boxed = _boxed(recipe)
    shardings = {name: place_frozen(name, tree, lambda: boxed, mesh) for name, tree in frozen.items()}
    return jax.device_put((params, dict(frozen)), (state_shardings(params, boxed, mesh), shardings))


def on_mesh(recipe: Recipe, shapes: Any, mesh: Mesh) -> Any:
    """Return shapes of a run's parameters with their shardings on a mesh, so that each device reads its own part."""
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        whole = replicated(mesh)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes)
    refuse_quantized(shapes, SPLIT)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, _boxed(recipe), mesh),
    )


def _boxed(recipe: Recipe) -> Any:
    with off_mesh():
        return boxed_params(make_task(recipe), recipe)


@dataclass(frozen=True, eq=False)
class Placement:
    """The devices that rows are read on.

    Attributes:
      mesh: None for one device.
      layout: in which the model wants the bytes of a row, where the mesh splits them.
      block: bytes that one device has to hold together.
    """

    mesh: Mesh | None = None
    layout: SequenceLayout = CONTIGUOUS
    block: int = 1

    @property
    def in_force(self) -> AbstractContextManager[Any]:
        """A context in which programs are compiled for the mesh."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def rows(self, count: int) -> int:
        """Return `count`, or as few more as divide among the devices."""
        return count if self.mesh is None else _up(count, self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def length(self, length: int) -> int:
        """Return `length`, or as few more positions as divide among the devices in whole blocks."""
        if self._sequence == 1:
            return length
        stretches = 1 if self.layout == CONTIGUOUS else 2
        return _up(length, self._sequence * stretches * self.block)

    def batch(self, batch: Batch) -> Batch:
        """Return a batch of NumPy arrays on the devices; every process has all of its rows."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        rows = len(batch.inputs)
        first, last = local_rows(batch_sharding(self.mesh), rows)
        return to_devices(jax.tree.map(lambda x: x[first:last], batch), self.mesh, rows, self.layout)

    def in_order(self, array: np.ndarray) -> np.ndarray:
        """Return [B, T, ...] of `batch` with the positions of a row in their order."""
        if self._sequence == 1 or self.layout == CONTIGUOUS:
            return array
        return array[:, np.argsort(self.layout.order(array.shape[1], self._sequence))]

    @property
    def _sequence(self) -> int:
        return 1 if self.mesh is None else self.mesh.shape["seq"]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def placement_of(recipe: Recipe, mesh: Mesh | None) -> Placement:
    """Return how a run's rows lie on a mesh, by its model and its patcher."""
    block = 1 if recipe.patcher is None else recipe.patcher.block_size
    return Placement(mesh, layout_of(recipe.model), block)
