"""Hopper: z = scale (x V) * c of the steps of 64 ranks that count in a tile of tokens, in one read of x.

A cluster takes tile after tile as in `mosaic_gpu_product`. A tile is 256 tokens and up to four of their steps, which
may lie anywhere. Each step is copied by itself, as rows of V^T: columns of V would not lie together in shared memory.
Steps that do not count are not written, so nothing may read them.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel
from pallas_kernels.routed_lora.hopper import STEP, UNIT
from pallas_kernels.routed_lora.mosaic_gpu_product import (
    CLUSTERS,
    HEIGHT,
    PAIR,
    ROWS,
    STAGES,
    WIDTH,
    WORKERS,
    Shared,
    multiply,
    scratch,
)
from pallas_kernels.routed_lora.steps import Steps

GROUP = WIDTH // STEP
"""Steps of a tile."""


def listed_down(
    x: Float[Array, "M K"],
    v: Float[Array, "R K"],
    numbers: Float[Array, "units tokens"],
    steps: Steps,
    *,
    interpret: Any,
) -> Float[Array, "M R"]:
    """Return z where steps count, anything elsewhere.

    Args:
      x: in bf16, as V is.
      v: V^T of all sites, a multiple of 64 ranks.
      numbers: scale and code of each `UNIT` ranks, fp32, at the tokens of whole tiles.
      steps: one list for each tile of tokens.
      interpret: as in `sums_of_products`.
    """
    tiles = steps.order.shape[0]
    groups = -(-v.shape[0] // WIDTH)
    kernel = mosaic_kernel(
        partial(_program, tiles=tiles, groups=groups),
        out_type=varying_like(x, (x.shape[0], v.shape[0]), x.dtype),
        grid=(min(CLUSTERS, tiles * groups),),
        grid_names=("cluster",),
        cluster=(PAIR,),
        cluster_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch(x.dtype, True, copies=1 + GROUP)],
        compiler_params=LANE,
        interpret=interpret,
        kernel_name="routed_lora_down",
    )
    return kernel(x, v, numbers, *steps)


def _program(*refs: Any, tiles: int, groups: int) -> None:
    x, v, numbers, order, counts, z, shared = refs
    worker = lax.axis_index("warpgroup")
    walk = partial(_walk, tiles=tiles, groups=groups, steps=x.shape[1] // STEP, listed=Steps(order, counts))

    @pl.when(worker == WORKERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _feed(x, v, shared, walk)

    @pl.when(worker < WORKERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        _compute(numbers, z, shared, walk, worker, x.shape[1] // STEP)


def _walk(visit: Any, *, tiles: int, groups: int, steps: int, listed: Steps) -> Array:
    """Call `visit` for each tile that has steps, and return the number of all steps.

    It gets the tile of tokens, steps of 64 ranks, their number, and steps before. The first group of all tiles comes
    first: where few steps count, no cluster is without work.
    """
    cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")

    def advance(i: Array, before: Array) -> Array:
        place = cluster + i * clusters
        tile, first = place % tiles, place // tiles * GROUP
        count = listed.counts[tile, 0]

        @pl.when(first < count)
        def _() -> None:
            # Repeat the last step, as a product has as many columns in each tile
            blocks = [listed.order[tile, jnp.minimum(first + j, count - 1)] for j in range(GROUP)]
            visit(tile, blocks, count - first, before)

        return before + jnp.where(first < count, jnp.int32(steps), 0)

    return lax.fori_loop(0, (tiles * groups - cluster + clusters - 1) // clusters, advance, jnp.int32(0))


def _feed(x: Any, v: Any, shared: Shared, walk: Any) -> None:
    """Copy what each step multiplies as soon as there is a place for it."""

    def visit(tile: Array, blocks: list[Array], _: Array, before: Array) -> None:
        rows = pl.ds((tile * PAIR + lax.axis_index("program")) * HEIGHT, HEIGHT)

        def copy(i: Array, _: None) -> None:
            step, columns = before + i, pl.ds(i * STEP, STEP)
            slot = step % STAGES
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
            there = shared.there.at[slot]
            plgpu.copy_gmem_to_smem(x.at[rows, columns], shared.left.at[slot], there)
            for j, block in enumerate(blocks):
                box, place = (
                    v.at[pl.ds(block * STEP, STEP), columns],
                    shared.right.at[slot, pl.ds(j * STEP, STEP)],
                )
                plgpu.copy_gmem_to_smem(box, place, there, collective_axes="program")

        lax.fori_loop(0, x.shape[1] // STEP, copy, None)

    def drain(step: Array, _: None) -> None:
        plgpu.barrier_wait(shared.free.at[step % STAGES])

    steps = walk(visit)
    lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, drain, None)


def _compute(numbers: Any, z: Any, shared: Shared, walk: Any, worker: Array, steps: int) -> None:
    """Compute a warpgroup's 64 rows of each tile."""

    def visit(tile: Array, blocks: list[Array], count: Array, before: Array) -> None:
        total = pl.run_scoped(
            partial(
                multiply,
                shared=shared,
                transposed=True,
                worker=worker,
                before=before,
                steps=jnp.int32(steps),
            ),
            plgpu.WGMMAAccumulatorRef((ROWS, WIDTH), jnp.float32),
        )
        first = (tile * PAIR + lax.axis_index("program")) * HEIGHT
        rows = pl.ds(first + worker * ROWS, ROWS)
        for j, block in enumerate(blocks):

            @pl.when(j < count)
            def _(j: int = j, block: Array = block) -> None:
                piece = shared.out.at[worker, j % 2]
                # Wait for all stores before a tile's first piece: the tile before may have stored only one.
                plgpu.wait_smem_to_gmem(min(j, 1), wait_read_only=True)
                own = total[:, j * STEP : (j + 1) * STEP]
                piece[...] = _scaled(own, numbers, block, rows).astype(z.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(piece, z.at[rows, pl.ds(block * STEP, STEP)])

    walk(visit)
    plgpu.wait_smem_to_gmem(0)


def _scaled(p: Float[Array, "64 64"], numbers: Any, block: Array, rows: Any) -> Float[Array, "64 64"]:
    """Return p of a step times scale and code, which its ranks share in units."""
    parts = []
    for i in range(STEP // UNIT):
        own = numbers.at[block * (STEP // UNIT) + i, rows]
        number = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        parts.append(p[:, i * UNIT : (i + 1) * UNIT] * lax.broadcast_in_dim(number, (ROWS, UNIT), (0,)))
    return jnp.concatenate(parts, 1)
