"""The Hopper kernels of packed rows within blocks of 512 steps, whose documents are taken one at a time.

64 blocks of a channel are eight tiles X_p [block, step], p the chunk of 64 steps within a block. No tile is shifted:

    Y_p = sum_{q <= p} X_q W_{p-q}^T,    W_l[i, j] = h[64 l + i - j]

One document of each block enters and leaves these products at a time, as often as one of the 64 blocks has documents.
A step is of one document, so y takes the place of x: who reads x there has read it. Two warpgroups have four of the
tiles each. Against time X_p takes from q >= p by W_{q-p}, which is the transpose.

The gradient of h is made of V_p^T X_{p-l}, summed over chunks, blocks and documents in fp32: as many numbers a channel
as W has, whose diagonals XLA sums.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.tiles import read, zeros
from pallas_kernels._hopper import CHUNK, ROWS, rows_per_program, varying_like
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.blocks import CHUNKS, Orders
from pallas_kernels.long_conv.mosaic_gpu_launch import launch

WORKERS = 2
OWN = CHUNKS // WORKERS
"""Tiles, and lags, of a warpgroup."""


def own(i: Any, worker: Array) -> Array:
    """Return the i-th tile of a warpgroup: 0, 3, 4, 7 or 1, 2, 5, 6.

    Both take equally many products.
    """
    return 2 * i + (i + worker) % 2


class Shared(NamedTuple):
    """Shared memory: x, then y; what of x is of one document; and what the kernels differ in."""

    tiles: Any
    alone: Any
    others: Any
    came: Any
    others_came: Any
    met: Any


def convolve_blocks(
    x: Float[Array, "D 8 N 64"],
    weights: Float[Array, "D 8 64 64"],
    orders: Orders,
    *,
    adjoint: bool,
    interpret: bool,
) -> Float[Array, "D 8 N 64"]:
    """Convolve causally within documents and blocks, or transpose that."""
    channels, _, count, _ = x.shape
    tiles = rows_per_program(count // ROWS, channels)
    return launch(
        partial(_convolve, tiles=tiles, adjoint=adjoint),
        (x, weights, *orders),
        jax.typeof(x),
        _shared(CHUNKS, barriers=1, arrivals=CHUNKS),
        grid=(channels, count // ROWS // tiles),
        workers=WORKERS,
        name="blocks_adjoint" if adjoint else "blocks",
        interpret=interpret,
    )


def correlate_blocks(
    x: Float[Array, "D 8 N 64"], v: Float[Array, "D 8 N 64"], orders: Orders, *, interpret: bool
) -> Float[Array, "D G 8 64 64"]:
    """Return the gradient of weights under the cotangent v, in G parts."""
    channels, _, count, _ = x.shape
    tiles = rows_per_program(count // ROWS, channels)
    parts = count // ROWS // tiles
    return launch(
        partial(_correlate, tiles=tiles),
        (x, v, *orders),
        varying_like(x, (channels, parts, CHUNKS, ROWS, CHUNK), jnp.float32),
        _shared(WORKERS, barriers=WORKERS, arrivals=1),
        grid=(channels, parts),
        workers=WORKERS,
        name="blocks_taps",
        interpret=interpret,
    )


def _shared(others: int, *, barriers: int, arrivals: int) -> Shared:
    return Shared(
        tiles=tile_ref(CHUNKS, ROWS, CHUNK, dtype=jnp.bfloat16),
        alone=tile_ref(CHUNKS, ROWS, CHUNK, dtype=jnp.bfloat16),
        others=tile_ref(others, ROWS, CHUNK, dtype=jnp.bfloat16),
        came=plgpu.Barrier(num_arrivals=OWN, num_barriers=WORKERS),
        others_came=plgpu.Barrier(num_arrivals=arrivals, num_barriers=barriers),
        met=plgpu.Barrier(num_arrivals=WORKERS),
    )


class _Tiles(NamedTuple):
    """Eight tiles of 64 blocks, of which a warpgroup has four."""

    x: Any
    order: Any
    shared: Shared
    worker: Array
    first: Array

    def box(self, array: Any, p: Any) -> Any:
        """Return the box of a tile in device memory."""
        return array.at[lax.axis_index("channel"), p, pl.ds(self.first, ROWS)]

    def load(self) -> None:
        """Load own tiles, and wait until they are here."""
        came = self.shared.came.at[self.worker]
        for i in range(OWN):
            p = own(i, self.worker)
            plgpu.copy_gmem_to_smem(self.box(self.x, p), self.shared.tiles.at[p], came)
        plgpu.barrier_wait(came)

    def of(self, document: Array, p: Any) -> Array:
        """Mark steps of a tile that are of the document of this order in their block."""
        order = self.order.at[p, pl.ds(self.first, ROWS)]
        return plgpu.load(order, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.int32) == document

    def part(self, document: Array) -> None:
        """Keep what is of one document, of all tiles."""

        def mask(i: Array, _: None) -> None:
            p = own(i, self.worker)
            self.shared.alone.at[p][...] = _keep(self.of(document, p), read(self.shared.tiles.at[p]))

        lax.fori_loop(0, OWN, mask, None)
        self.meet()

    def meet(self) -> None:
        """Wait until both warpgroups have come here, and see what the other has written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.shared.met)
        plgpu.barrier_wait(self.shared.met)


def _keep(mask: Array, z: Array) -> Array:
    return jnp.where(mask, z, jnp.zeros_like(z))


def _convolve(
    x: Any, weights: Any, order: Any, passes: Any, y: Any, shared: Shared, *, tiles: int, adjoint: bool
) -> None:
    """Convolve `passes` times 64 blocks of a channel."""
    channel, worker = lax.axis_index("channel"), lax.axis_index("warpgroup")

    @pl.when(worker == 0)
    def _() -> None:
        for lag in range(CHUNKS):
            plgpu.copy_gmem_to_smem(weights.at[channel, lag], shared.others.at[lag], shared.others_came.at[0])

    plgpu.barrier_wait(shared.others_came.at[0])

    def step(index: Array, _: None) -> None:
        at = lax.axis_index("rows") * tiles + index
        block = _Tiles(x, order, shared, worker, at * ROWS)
        block.load()
        lax.fori_loop(0, passes[at], lambda document, _: document_of(block, document), None)
        plgpu.commit_smem()
        for i in range(OWN):
            p = own(i, worker)
            plgpu.copy_smem_to_gmem(shared.tiles.at[p], block.box(y, p))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def document_of(block: _Tiles, document: Array) -> None:
        block.part(document)

        def tile(i: Array, _: None) -> None:
            p = own(i, worker)
            found, place = _product(shared, p, adjoint=adjoint), shared.tiles.at[p]
            place[...] = jnp.where(block.of(document, p), found.astype(jnp.bfloat16), read(place))

        lax.fori_loop(0, OWN, tile, None)
        block.meet()

    lax.fori_loop(0, tiles, step, None)
    plgpu.wait_smem_to_gmem(0)


def _product(shared: Shared, p: Array, *, adjoint: bool) -> Array:
    """Return Y_p of one document."""

    def issue(total: Any) -> Array:
        def add(lag: Array, _: None) -> None:
            q, weight = (p + lag, shared.others.at[lag]) if adjoint else (p - lag, shared.others.at[lag].T)
            plgpu.wgmma(total, shared.alone.at[q], weight)

        lax.fori_loop(0, CHUNKS - p if adjoint else p + 1, add, None)
        return total[...]

    return pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32))


def _correlate(x: Any, v: Any, order: Any, passes: Any, found: Any, shared: Shared, *, tiles: int) -> None:
    """Correlate `passes` times 64 blocks of a channel; a warpgroup has four lags."""
    worker = lax.axis_index("warpgroup")
    place, came = shared.others.at[worker], shared.others_came.at[worker]

    def step(index: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        at = lax.axis_index("rows") * tiles + index
        block = _Tiles(x, order, shared, worker, at * ROWS)
        block.load()
        return lax.fori_loop(0, passes[at], partial(document_of, block), totals)

    def document_of(block: _Tiles, document: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        block.part(document)

        def tile(p: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            plgpu.commit_smem()  # All warps have done with the tile that was here.
            plgpu.copy_gmem_to_smem(block.box(v, p), place, came)
            plgpu.barrier_wait(came)
            place[...] = _keep(block.of(document, p), read(place))
            plgpu.commit_smem()
            return tuple(
                _add_outer(total, shared, place, p, own(i, worker)) for i, total in enumerate(totals)
            )

        totals = lax.fori_loop(0, CHUNKS, tile, totals)
        block.meet()
        return totals

    totals = lax.fori_loop(0, tiles, step, tuple(zeros() for _ in range(OWN)))
    for i, total in enumerate(totals):
        found[lax.axis_index("channel"), lax.axis_index("rows"), own(i, worker)] = total


def _add_outer(total: Array, shared: Shared, v: Any, p: Array, lag: Array) -> Array:
    """Return the total and V_p^T X_{p-lag} of one document; nothing lies before the block."""

    def issue(found: Any) -> Array:
        plgpu.wgmma(found, v.T, shared.alone.at[p - lag])
        return found[...]

    def add(_: Array, total: Array) -> Array:
        return total + pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((ROWS, CHUNK), jnp.float32))

    return lax.fori_loop(0, (lag <= p).astype(jnp.int32), add, total)
