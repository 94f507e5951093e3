"""The documents of a tile as the Hopper kernels see them: which steps and chunks act on each other."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels._conv.documents import REACH, Marks
from pallas_kernels._hopper import CHUNK, ROWS


@dataclass(frozen=True)
class TileDocuments:
    """`documents.Marks` of one tile; `reverse` if it is walked against time.

    Masks of steps are comparisons with a number for each chunk. Bytes of steps are read, again each time, in tiles with
    holes or padding only.
    """

    read_steps: Callable[[], Array]
    read_bound: Callable[[Any], Array]
    links: Array
    passes: Array
    holes: Array
    reverse: bool

    @classmethod
    def load(cls, marks: Any, row: Array, tile: Array, *, reverse: bool) -> "TileDocuments":
        """Load from device memory, where all channels read the same.

        `marks` are those of `marks_of`.
        """
        steps, links, passes, bounds, holes = marks
        chunks = pl.ds(tile * ROWS, ROWS)

        def read_steps() -> Array:
            ref = steps.at[row, chunks]
            return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.int32)

        def by_chunk(ref: Any) -> Array:
            return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False).astype(jnp.int32)

        return cls(
            read_steps,
            lambda order: by_chunk(bounds.at[row, order, chunks]),
            by_chunk(links.at[row, chunks, 0]),
            passes[row, tile],
            holes[row, tile],
            reverse,
        )

    def read_ahead(self) -> "TileDocuments":
        """Read the bounds that every tile needs before a wait for its streams.

        After the wait they would be read one by one.
        """
        early = {order: self.read_bound(order) for order in (0, 1, CHUNK)}

        def read_bound(order: Any) -> Array:
            return early[order] if isinstance(order, int) and order in early else self.read_bound(order)

        return replace(self, read_bound=read_bound)

    def tokens(self, z: Array) -> Array:
        """Return z at tokens, else zero."""
        return lax.fori_loop(0, self.holes, lambda _, z: _keep(self.read_steps() >= 0, z), z)

    def entering(self, z: Array) -> Array:
        """Return z at steps of the document that a state enters with: the first of the walk."""
        return _keep(~self._from(self.read_bound(0)), z)

    def leaving(self, z: Array) -> Array:
        """Return z at steps of the document whose state leaves a chunk: the last of the walk."""
        return _keep(self._from(self.read_bound(CHUNK)), z)

    def first(self, z: Array) -> Array:
        """Return `entering` for `cut_apart`, or z if the tile's chunks hold one document each."""
        return lax.fori_loop(0, jnp.minimum(self.passes - 1, 1), lambda _, z: self.entering(z), z)

    def cut_apart(self, out: Array, product: Callable[[Callable[[Array], Array]], Array]) -> Array:
        """Add to `out` the outputs of documents behind the chunks' first.

        `out` is the chunks' outputs of what `first` keeps of the inputs. `product` is given what keeps a document's own
        steps of the inputs. All steps behind its first one would give the same numbers, but a NaN in a later document
        of the walk would reach this one as zero times NaN.
        """

        def each(order: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            out, start, end = carry
            behind = self._from(start)
            found = product(lambda z: _keep(behind & ~self._from(end), z))
            return jnp.where(behind, found, out), end, self.read_bound(order + 1)

        bounds = self.read_bound(0), self.read_bound(1)
        return lax.fori_loop(1, self.passes, each, (out, *bounds))[0]

    def behind_the_first(
        self, add: Callable[[Callable[[Array], Array], Callable[[Array], Array], Array], Array], total: Array
    ) -> Array:
        """Add what each document of a chunk, except the walk's first, adds to a total.

        `add` is given what keeps the steps from its first one on, what keeps its own, and the total.
        """

        def each(order: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            total, bound = carry
            end = self.read_bound(order)

            def own(z: Array) -> Array:
                return _keep(self._from(bound) & ~self._from(end), z)

            return add(lambda z: _keep(self._from(bound), z), own, total), end

        return lax.fori_loop(1, self.passes, each, (total, self.read_bound(0)))[0]

    def linked(self, z: Array, chunks: int) -> Array:
        """Return z [chunk, any] where what was sent `chunks` and one more before arrives, else 0."""
        return _keep(self._links_over(z) & REACH > chunks, z)

    def linked_to_tile(self, z: Array) -> Array:
        """Return z [chunk, mode] where the state before the tile arrives, else zero."""
        chunk = plgpu.broadcasted_iota(jnp.int32, z.shape, 0, layout=plgpu.Layout.WGMMA)
        steps = ROWS - 1 - chunk if self.reverse else chunk
        return _keep(self._links_over(z) & REACH > steps, z)

    def through(self, z: Array) -> Array:
        """Return z [chunk, mode] where the chunk holds one document, else zero."""
        return _keep(self._links_over(z) < 0, z)

    def _links_over(self, z: Array) -> Array:
        """Return each chunk's links for all columns of z."""
        return lax.broadcast_in_dim(self.links, z.shape, (0,))

    def _from(self, bound: Array) -> Array:
        """Mark steps that the walk meets from a bound of each chunk on."""
        step = plgpu.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 1, layout=plgpu.Layout.WGMMA)
        bound = lax.broadcast_in_dim(bound, (ROWS, CHUNK), (0,))
        return step < bound if self.reverse else step >= bound


def _keep(mask: Array, z: Array) -> Array:
    return jnp.where(mask, z, jnp.zeros_like(z))


def marks_of(marks: Marks | None, reverse: bool) -> list[Array]:
    """Return what `TileDocuments.load` takes: the marks of one direction."""
    if marks is None:
        return []
    links, bounds = (marks.links_back, marks.ends) if reverse else (marks.links, marks.begins)
    return [marks.steps, links, marks.passes, bounds, marks.holes]
