"""Short rows of one channel in one tile of the Hopper kernels, one behind another, each in as many chunks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._hopper import ROWS
from pallas_kernels.modal_conv.hopper import MODES


@dataclass(frozen=True)
class TileRows:
    """The rows that share a tile; each begins from a state of zero. `reverse` if it is walked against time."""

    count: int
    reverse: bool

    @property
    def chunks(self) -> int:
        """Chunks that a row has for itself; those it does not fill read zeros."""
        return ROWS // self.count

    @property
    def edge(self) -> int:
        """Rows before a tile's sums: as far as a round looks. What they hold is dropped."""
        return ROWS // 4

    def neighbours(self, distance: int, fan: int) -> list[int]:
        """Return how many times `distance` chunks back a round looks that joins `fan` neighbours."""
        return [k for k in range(1, fan) if k * distance < self.chunks]

    def distances(self, fan: int) -> list[int]:
        """Return how many chunks back any round looks."""
        return [k * distance for distance in (1, fan, fan * fan) for k in self.neighbours(distance, fan)]

    def boxes(self, ref: Any, first: Array, channels: int) -> list[Any]:
        """Return where the rows of a tile lie in device memory.

        A stream is [row and channel, chunk, step], from row `first`.
        """
        return [ref.at[first + row * channels, pl.ds(0, self.chunks)] for row in range(self.count)]

    def parts(self, tile: Any) -> list[Any]:
        """Return the same rows in a tile in shared memory."""
        return [tile.at[row * self.chunks : (row + 1) * self.chunks] for row in range(self.count)]

    def linked(self, z: Array, chunks: int) -> Array:
        """Return z [chunk, mode] where what was sent `chunks` and one more before arrives, else 0."""
        chunk = plgpu.broadcasted_iota(jnp.int32, (ROWS, MODES), 0, layout=plgpu.Layout.WGMMA)
        walked = chunk & (self.chunks - 1)
        walked = self.chunks - 1 - walked if self.reverse else walked
        return jnp.where(walked > chunks, z, jnp.zeros_like(z))
