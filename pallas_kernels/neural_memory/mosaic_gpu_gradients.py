"""Hopper: gradients by M1 and M2 of f(x) = x + silu(x M1) M2; what has a column for each hidden unit stays on chip.

A program has 64 hidden units of a memory, and walks over its tokens 64 at a time. One warpgroup copies tokens and
cotangents to shared memory; two compute, each with one gradient of its units in registers:

    h = x M1          s = theta silu(h)                    by M2:              sum s^T g
    b = g M2^T        d = theta b silu'(h)                 by M1, transposed:  sum d^T x

all transposed, so that units are rows. The first warpgroup has h, and hands silu'(h) to the second one. A turn on the
tensor cores is the sum of one step and h or b of the next; while a warpgroup has what is elementwise, the other one has
its turn. s and d go through shared memory: see docs/notes/mosaic-gpu.md on left operands in registers. Two programs are
a cluster, 128 units of one memory: each copies half of a step's tokens, to both.
"""

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
from pallas_kernels.neural_memory.hopper import PAIR, ROWS, WORKERS
from pallas_kernels.neural_memory.mosaic_gpu_read import LOG2E, PIECE, Ring

STAGES = 2
"""Steps under way."""


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      first, second: columns of M1 and rows of M2 of its hidden units.
      asked: when each of them is there.
      tokens, cotangents: of each step under way.
      left: s and d.
      slope: silu'(h), and below when it is there, and when it may be overwritten.
      turns: whose products go next.
    """

    first: Any
    second: Any
    asked: Any
    tokens: Ring
    cotangents: Ring
    left: Any
    slope: Any
    made: Any
    taken: Any
    turns: Any


def weight_gradients(
    x: Float[Array, "R C K"],
    g: Float[Array, "R C K"],
    first: Float[Array, "R K E"],
    second: Float[Array, "R E K"],
    theta: Float[Array, "R 2 C"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "R 2 E K"], Float[Array, "R 2 E"]]:
    """Return gradients of sum_t theta_t f(x_t) g_t by M2 and M1, and two sums a hidden unit.

    The gradient by M1 is transposed. The sums are sum_t theta_t silu(h)^2 and sum_t theta'_t (b silu'(h))^2. All is
    summed in fp32, and fp32.

    Args:
      x, g, first, second: in bf16; K is a multiple of 128, E of 128.
      theta: theta and theta'.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    theta = jnp.pad(theta, ((0, 0), (0, 0), (0, -theta.shape[2] % PIECE)))
    given = vary_alike(x, g, first, second, theta)
    rows, hidden, width = second.shape
    kernel = mosaic_kernel(
        partial(_program, clusters=hidden // (PAIR * ROWS), steps=-(-x.shape[1] // PIECE)),
        out_type=[
            varying_like(given[0], (rows, 2, hidden, width), jnp.float32),
            varying_like(given[0], (rows, 2, hidden), jnp.float32),
        ],
        grid=(rows * (hidden // (PAIR * ROWS)),),
        grid_names=("cluster",),
        cluster=(PAIR,),
        cluster_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch(x.dtype, width)],
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name="neural_memory_gradients",
    )
    by_weights, powers = kernel(*given)
    return by_weights, powers


def _scratch(dtype: Any, width: int) -> Shared:
    tiles = partial(tile_ref, dtype=dtype)

    def ring() -> Ring:
        free = plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=WORKERS, num_barriers=STAGES)
        return Ring(tiles(STAGES, PIECE, width), plgpu.Barrier(num_barriers=STAGES), free)

    return Shared(
        first=tiles(width, ROWS),
        second=tiles(ROWS, width),
        asked=plgpu.Barrier(num_barriers=WORKERS),
        tokens=ring(),
        cotangents=ring(),
        left=tiles(WORKERS, ROWS, PIECE),
        slope=tiles(ROWS, PIECE),
        made=plgpu.Barrier(),
        taken=plgpu.Barrier(),
        turns=plgpu.Barrier(num_barriers=WORKERS),
    )


def _program(
    x: Any,
    g: Any,
    first: Any,
    second: Any,
    theta: Any,
    by_weights: Any,
    powers: Any,
    shared: Shared,
    *,
    clusters: int,
    steps: int,
) -> None:
    """Run half of the hidden units of a cluster."""
    worker, cluster = lax.axis_index("warpgroup"), lax.axis_index("cluster")
    row = cluster // clusters
    units = pl.ds((cluster % clusters * PAIR + lax.axis_index("program")) * ROWS, ROWS)

    @pl.when(worker == WORKERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _feed((x.at[row], g.at[row]), (shared.tokens, shared.cotangents), steps)

    sources = ((first.at[row, :, units], shared.first), (second.at[row, units], shared.second))
    for own, (source, place) in enumerate(sources):

        @pl.when(worker == own)
        def _(own: int = own, source: Any = source, place: Any = place) -> None:
            plgpu.set_max_registers(232, action="increase")
            plgpu.copy_gmem_to_smem(source, place, shared.asked.at[own])
            plgpu.barrier_wait(shared.asked.at[own])
            total, power = pl.run_scoped(
                partial(_sum, theta=theta.at[row], shared=shared, own=own, steps=steps),
                plgpu.WGMMAAccumulatorRef((ROWS, x.shape[2]), jnp.float32),
            )
            by_weights[row, own, units] = total
            powers[row, own, units] = power


def _feed(sources: tuple[Any, ...], rings: tuple[Ring, ...], steps: int) -> None:
    """Copy tokens and cotangents of a step once there is a place; wait for all at the end."""

    def advance(step: Array, _: None) -> None:
        slot = step % STAGES
        for source, ring in zip(sources, rings, strict=True):
            pl.when(step >= STAGES)(lambda ring=ring: plgpu.barrier_wait(ring.free.at[slot]))
            box, there = source.at[pl.ds(step * PIECE, PIECE)], ring.there.at[slot]
            plgpu.copy_gmem_to_smem(box, ring.halves.at[slot], there, collective_axes="program")

    def drain(step: Array, _: None) -> None:
        for ring in rings:
            plgpu.barrier_wait(ring.free.at[step % STAGES])

    lax.fori_loop(0, steps, advance, None)
    lax.fori_loop(max(steps - STAGES, 0), steps, drain, None)


def _sum(
    total: Any, *, theta: Any, shared: Shared, own: int, steps: int
) -> tuple[Float[Array, "64 K"], Float[Array, "64"]]:
    """Return a warpgroup's gradient of the program's hidden units, and its sum of squares."""
    left, weights = shared.left.at[own], (shared.first.T, shared.second)[own]
    rings = (shared.tokens, shared.cotangents)
    multiplied, summed = rings[own], rings[1 - own]

    def add(step: Array) -> None:
        """Start the sum of a step."""
        slot = step % STAGES
        plgpu.barrier_wait(summed.there.at[slot])
        plgpu.wgmma(total, left, summed.halves.at[slot])

    def product(step: Array, *, adding: bool) -> Float[Array, "64 64"]:
        """Return h or b of a step, and the sum of the step before."""
        slot, before = step % STAGES, (step - 1) % STAGES

        def issue(found: Any) -> Array:
            if adding:
                add(step - 1)
            plgpu.barrier_wait(multiplied.there.at[slot])
            plgpu.wgmma(found, weights, multiplied.halves.at[slot].T)
            if adding:
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(summed.free.at[before])
                plgpu.barrier_arrive(shared.turns.at[1 - own])
            return found[...]

        found = pl.run_scoped(issue, plgpu.WGMMAAccumulatorRef((ROWS, PIECE), jnp.float32))
        plgpu.barrier_arrive(multiplied.free.at[slot])
        return found

    def bend(found: Array, step: Array, *, adding: bool) -> Float[Array, "64"]:
        """Leave s or d where it is to be multiplied, and return their squares' sums."""
        at = pl.ds(step * PIECE, PIECE)
        share = _along(theta.at[0, at])
        if own == 0 and adding:
            # Wait here: behind what is elementwise all of it would be kept meanwhile.
            plgpu.barrier_wait(shared.taken)
        if own == 0:
            # Square the root to get the sigmoid: a quotient would take more instructions.
            root = lax.rsqrt(1 + jnp.exp2(found * -LOG2E))
            gate = root * root
            silu = found * gate
            scaled, squared = silu * share, silu * silu * share
            shared.slope[...] = (gate + silu * (1 - gate)).astype(left.dtype)
        else:
            plgpu.barrier_wait(shared.made)
            slope = plgpu.load(shared.slope, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            plgpu.barrier_arrive(shared.taken)
            sloped = found * slope
            scaled, squared = sloped * share, sloped * sloped * _along(theta.at[1, at])
        left[...] = scaled.astype(left.dtype)
        plgpu.commit_smem()
        if own == 0:
            plgpu.barrier_arrive(shared.made)
        return squared.sum(axis=1)

    def advance(step: Array, power: Array) -> Array:
        plgpu.barrier_wait(shared.turns.at[own])
        found = product(step, adding=True)
        return power + bend(found, step, adding=True)

    if own == 1:
        plgpu.barrier_arrive(shared.turns.at[0])
    start = jnp.int32(0)
    power = bend(product(start, adding=False), start, adding=False)
    power = lax.fori_loop(1, steps, advance, power)
    add(jnp.int32(steps - 1))
    found = total[...]
    plgpu.barrier_arrive(summed.free.at[(steps - 1) % STAGES])
    if own == 0:
        plgpu.barrier_wait(shared.turns.at[0])
        plgpu.barrier_wait(shared.taken)
    return found, power


def _along(weights: Any) -> Float[Array, "64 64"]:
    """Read one number a token, from memory, in each row."""
    column = plgpu.load(weights, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(column, (ROWS, PIECE), [1])
