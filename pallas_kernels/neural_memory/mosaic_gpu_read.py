"""Hopper: f(x) = x + silu(x M1) M2 of many memories, with what has a column for each hidden unit only on chip.

A program takes 128 tokens of a memory, and walks over the hidden units 128 at a time. One warpgroup copies blocks of
M1's columns and of M2's rows to shared memory, in halves; two compute, 64 tokens each:

    p = silu(x M1[:, block])        y = y + p M2[block, :]

A warpgroup's turn on the tensor cores is p M2 of one block and x M1 of the next; while it has its silu, the other one
has its turn. p goes through shared memory: see docs/notes/mosaic-gpu.md on left operands in registers. Two programs are
a cluster, 256 tokens of one memory: each copies half of a block, to both. So a block is read once for 256 tokens.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import APPROXIMATE, mosaic_kernel, tile_ref
from pallas_kernels.neural_memory.hopper import BLOCK, PAIR, ROWS, TOKENS, WORKERS

PIECE = BLOCK // 2
"""Columns of a swizzled tile of bf16; hidden units of half a block of M2."""
LOG2E = math.log2(math.e)


class Ring(NamedTuple):
    """Two places for the halves of a block: when a half is there, and when both programs may overwrite it."""

    halves: Any
    there: Any
    free: Any


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      tokens: of each warpgroup, in their place later the results.
      asked: when they are there.
      bent: silu of a block, of each warpgroup and by halves.
      first, second: blocks of M1 and M2.
      turns: whose products go next.
    """

    tokens: Any
    asked: Any
    bent: Any
    first: Ring
    second: Ring
    turns: Any


def read(
    x: Float[Array, "R C K"],
    first: Float[Array, "R K E"],
    second: Float[Array, "R E K"],
    minus: Float[Array, "R C K"] | None = None,
    *,
    interpret: Any,
) -> Float[Array, "R C K"]:
    """Return f(x) - minus, rows of x by the memory of the same number.

    All are in bf16, summed in fp32 and rounded once.

    Args:
      x, first, second: K is a multiple of 128, E of 128.
      minus: zeros if None.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    given = vary_alike(*(z for z in (x, first, second, minus) if z is not None))
    x, first = given[:2]
    rows, length, width = x.shape
    tiles = -(-length // TOKENS)
    kernel = mosaic_kernel(
        partial(_program, tiles=tiles, blocks=first.shape[2] // BLOCK),
        out_type=varying_like(x, x.shape, x.dtype),
        grid=(rows * tiles,),
        grid_names=("tile",),
        cluster=(PAIR,),
        cluster_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(x.dtype, width)],
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name="neural_memory_read",
    )
    return kernel(*given)


def _scratch(dtype: Any, width: int) -> Shared:
    tiles = partial(tile_ref, dtype=dtype)

    def ring(*shape: int) -> Ring:
        free = plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=WORKERS, num_barriers=2)
        return Ring(tiles(2, *shape), plgpu.Barrier(num_barriers=2), free)

    pair = plgpu.Barrier(num_barriers=WORKERS)
    return Shared(
        tokens=tiles(WORKERS, ROWS, width),
        asked=pair,
        bent=tiles(WORKERS, 2, ROWS, PIECE),
        first=ring(width // 2, BLOCK),
        second=ring(PIECE, width),
        turns=pair,
    )


def _program(*refs: Any, tiles: int, blocks: int) -> None:
    """Run half of the tokens of a cluster."""
    x, first, second, *minus, y, shared = refs
    worker, tile = lax.axis_index("warpgroup"), lax.axis_index("tile")
    row = tile // tiles

    @pl.when(worker == WORKERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _feed(first.at[row], second.at[row], shared, blocks)

    @pl.when(worker < WORKERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        start = tile % tiles * TOKENS + (lax.axis_index("program") * WORKERS + worker) * ROWS
        box, tokens = (row, pl.ds(start, ROWS)), shared.tokens.at[worker]
        plgpu.copy_gmem_to_smem(x.at[box], tokens, shared.asked.at[worker])
        plgpu.barrier_wait(shared.asked.at[worker])
        total = pl.run_scoped(
            partial(_apply, shared=shared, worker=worker, blocks=blocks),
            plgpu.WGMMAAccumulatorRef((ROWS, x.shape[2]), jnp.float32),
        )
        total = total + _wide(tokens)
        for subtracted in minus:
            plgpu.commit_smem()
            plgpu.copy_gmem_to_smem(subtracted.at[box], tokens, shared.asked.at[worker])
            plgpu.barrier_wait(shared.asked.at[worker])
            total = total - _wide(tokens)
        tokens[...] = total.astype(x.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tokens, y.at[box])
        plgpu.wait_smem_to_gmem(0)


def _wide(place: Any) -> Float[Array, "64 K"]:
    return plgpu.load(place, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _feed(first: Any, second: Any, shared: Shared, blocks: int) -> None:
    """Copy each half of a block once there is a place; wait for all places at the end."""

    def copy(ring: Ring, half: int, source: Any, block: Array) -> None:
        pl.when(block > 0)(lambda: plgpu.barrier_wait(ring.free.at[half]))
        there = ring.there.at[half]
        plgpu.copy_gmem_to_smem(source, ring.halves.at[half], there, collective_axes="program")

    def advance(block: Array, _: None) -> None:
        height = shared.first.halves.shape[1]
        for half in range(2):
            box = (pl.ds(half * height, height), pl.ds(block * BLOCK, BLOCK))
            copy(shared.first, half, first.at[box], block)
        for half in range(2):
            copy(shared.second, half, second.at[pl.ds(block * BLOCK + half * PIECE, PIECE)], block)

    lax.fori_loop(0, blocks, advance, None)
    for ring in (shared.first, shared.second):
        for half in range(2):
            plgpu.barrier_wait(ring.free.at[half])


def _apply(total: Any, *, shared: Shared, worker: Array, blocks: int) -> Float[Array, "64 K"]:
    """Return silu(x M1) M2 of a warpgroup's tokens."""
    tokens, bent = shared.tokens.at[worker], shared.bent.at[worker]
    height = shared.first.halves.shape[1]
    before = [tokens.at[:, pl.ds(half * height, height)] for half in range(2)]
    after = [bent.at[half] for half in range(2)]

    def turn(hidden: Any, behind: bool) -> Float[Array, "64 128"] | None:
        """Multiply by halves of M2 if a block is behind, and of M1 if one is to come."""
        steps = [(total, after[half], shared.second, half) for half in range(2) if behind]
        if hidden is not None:
            steps += [(hidden, before[half], shared.first, half) for half in range(2)]
        for i, (result, left, ring, half) in enumerate(steps):
            plgpu.barrier_wait(ring.there.at[half])
            plgpu.wgmma(result, left, ring.halves.at[half])
            if i:
                plgpu.wgmma_wait(1)
                _, _, ring, half = steps[i - 1]
                plgpu.barrier_arrive(ring.free.at[half])
        if behind and hidden is not None:
            plgpu.barrier_arrive(shared.turns.at[1 - worker])
        found = None if hidden is None else hidden[...]
        if hidden is None:
            plgpu.wgmma_wait(0)
        _, _, ring, half = steps[-1]
        plgpu.barrier_arrive(ring.free.at[half])
        return found

    def bend(behind: bool) -> None:
        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, BLOCK), jnp.float32)
        hidden = pl.run_scoped(partial(turn, behind=behind), accumulator)
        # Square the root to get the sigmoid: a quotient would take more instructions.
        root = lax.rsqrt(1 + jnp.exp2(hidden * -LOG2E))
        p = (hidden * root * root).astype(tokens.dtype)
        for half in range(2):
            bent.at[half][...] = p[:, half * PIECE : (half + 1) * PIECE]
        plgpu.commit_smem()

    def advance(block: Array, _: None) -> None:
        del block
        plgpu.barrier_wait(shared.turns.at[worker])
        bend(behind=True)

    pl.when(worker == 1)(lambda: plgpu.barrier_arrive(shared.turns.at[0]))
    bend(behind=False)
    lax.fori_loop(0, blocks - 1, advance, None)
    turn(None, behind=True)
    pl.when(worker == 0)(lambda: plgpu.barrier_wait(shared.turns.at[0]))
    return total[...]
