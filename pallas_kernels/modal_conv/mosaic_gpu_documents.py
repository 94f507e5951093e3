"""The documents of a tile as the Hopper kernels see them: which steps and chunks act on each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._hopper import ROWS
from pallas_kernels.modal_conv.documents import LAST, REACH
from pallas_kernels.modal_conv.hopper import MODES


@dataclass(frozen=True)
class TileDocuments:
    """`documents.Marks` of one tile, in registers; `reverse` if it is walked against time.

    Where registers are scarce, `steps` is read again from device memory wherever it is asked for.
    """

    read_steps: Callable[[], Array]
    links: Array
    passes: Array
    reverse: bool

    @classmethod
    def load(
        cls, marks: Any, row: Array, tile: Array, *, reverse: bool, keep_steps: bool = True
    ) -> "TileDocuments":
        """From device memory, where all channels read the same; `marks` is [steps, links, passes]."""
        steps, links, passes = marks
        chunks = pl.ds(tile * ROWS, ROWS)
        layout = plgpu.Layout.WGMMA

        def read(z: Any) -> Array:
            return plgpu.load(z.at[row, chunks], layout=layout, optimized=False).astype(jnp.int32)

        kept = read(steps) if keep_steps else None
        return cls(lambda: read(steps) if kept is None else kept, read(links), passes[row, tile], reverse)

    @property
    def steps(self) -> Array:
        """Marks of steps; see the class."""
        return self.read_steps()

    def tokens(self, z: Array) -> Array:
        """z at tokens, else zero."""
        return _keep(self.steps >= 0, z)

    def has(self, order: Any) -> Array:
        """Which steps are tokens of their chunk's document of this order."""
        steps = self.steps
        return (steps == order) | (steps == order + LAST)

    def entering(self, z: Array) -> Array:
        """z at tokens of the document that a state enters with: the chunk's first of the walk."""
        return _keep(self.steps >= LAST if self.reverse else self.has(0), z)

    def leaving(self, z: Array) -> Array:
        """z at tokens of the document whose state a chunk leaves behind: the chunk's last of the walk."""
        return _keep(self.has(0) if self.reverse else self.steps >= LAST, z)

    def linked(self, z: Array, chunks: int) -> Array:
        """z [chunk, mode] where what was sent as many chunks before the one right before arrives, else zero."""
        return _keep(self.links & REACH > chunks, z)

    def linked_to_tile(self, z: Array) -> Array:
        """z [chunk, mode] where the state before the tile arrives, else zero."""
        chunk = plgpu.broadcasted_iota(jnp.int32, (ROWS, MODES), 0, layout=plgpu.Layout.WGMMA)
        steps = ROWS - 1 - chunk if self.reverse else chunk
        return _keep(self.links & REACH > steps, z)

    def through(self, z: Array) -> Array:
        """z [chunk, mode] where the chunk holds one document, else zero."""
        return _keep(self.links < 0, z)


def _keep(mask: Array, z: Array) -> Array:
    return jnp.where(mask, z, jnp.zeros_like(z))


def marks_of(documents: Any, reverse: bool) -> list[Any]:
    """What `TileDocuments.load` takes of `documents.Marks`."""
    return [documents.steps, documents.links_back if reverse else documents.links, documents.passes]
