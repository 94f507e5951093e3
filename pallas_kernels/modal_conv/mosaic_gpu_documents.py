"""The documents of a tile as the Hopper kernels see them: which steps and chunks act on each other."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._hopper import ROWS
from pallas_kernels.modal_conv.documents import LAST
from pallas_kernels.modal_conv.hopper import MODES


@dataclass(frozen=True)
class TileDocuments:
    """`documents.Marks` of one tile, in registers; `reverse` if it is walked against time."""

    steps: Array
    links: Array
    passes: Array
    reverse: bool

    @classmethod
    def load(cls, marks: Any, row: Array, tile: Array, reverse: bool) -> "TileDocuments":
        """From device memory, where all channels read the same; `marks` is [steps, links, passes]."""
        steps, links, passes = marks
        chunks = pl.ds(tile * ROWS, ROWS)
        layout = plgpu.Layout.WGMMA
        return cls(
            plgpu.load(steps.at[row, chunks], layout=layout, optimized=False),
            plgpu.load(links.at[row, chunks], layout=layout, optimized=False),
            passes[row, tile],
            reverse,
        )

    def tokens(self, z: Array) -> Array:
        """z at tokens, else zero."""
        return _keep(self.steps >= 0, z)

    def has(self, order: Any) -> Array:
        """Which steps are tokens of their chunk's document of this order."""
        return (self.steps == order) | (self.steps == order + LAST)

    def entering(self, z: Array) -> Array:
        """z at tokens of the document that a state enters with: the chunk's first of the walk."""
        return _keep(self.steps >= LAST if self.reverse else self.has(0), z)

    def leaving(self, z: Array) -> Array:
        """z at tokens of the document whose state a chunk leaves behind: the chunk's last of the walk."""
        return _keep(self.has(0) if self.reverse else self.steps >= LAST, z)

    def linked(self, z: Array, chunks: int) -> Array:
        """z [chunk, mode] where what was sent as many chunks before the one right before arrives, else zero."""
        return _keep(self.links >= 2 * (chunks + 1), z)

    def linked_to_tile(self, z: Array) -> Array:
        """z [chunk, mode] where the state before the tile arrives, else zero."""
        chunk = plgpu.broadcasted_iota(jnp.int32, (ROWS, MODES), 0, layout=plgpu.Layout.WGMMA)
        steps = ROWS - 1 - chunk if self.reverse else chunk
        return _keep(self.links >= 2 * (steps + 1), z)

    def through(self, z: Array) -> Array:
        """z [chunk, mode] where the chunk holds one document, else zero."""
        return _keep(self.links % 2 == 1, z)


def _keep(mask: Array, z: Array) -> Array:
    return jnp.where(mask, z, jnp.zeros_like(z))


def marks_of(documents: Any, reverse: bool) -> list[Any]:
    """What `TileDocuments.load` takes of `documents.Marks`."""
    return [documents.steps, documents.links_back if reverse else documents.links, documents.passes]
