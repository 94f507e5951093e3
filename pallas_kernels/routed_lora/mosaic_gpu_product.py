"""Hopper: sums of products of matrices, each written once.

An output is the sum of left right over its terms, such as x W + z U. The accumulator of a tile runs through the columns
of x, then through those of z, and is rounded once. A cluster of two persistent programs takes one tile of 256 x 256
after another, 128 rows each. One warpgroup of a program copies 64 columns of left and 64 rows of right at a time to a
ring in shared memory; of right each program copies half, to both. Two warpgroups compute, 64 rows each, with both
operands of their products in shared memory.

Arrays of tokens are [rows, tokens, channels]. Those on the left, or the outputs, may have channels before tokens. Then
a tile's left operand lies transposed in shared memory, or its results are transposed as they are written there. A tile
has tokens of one row.

A last term may have the steps of a list instead of all, another one for each row of tiles.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel, tile_ref
from pallas_kernels.routed_lora.grid import Grid, Place, Side, Term, pick, place_of
from pallas_kernels.routed_lora.hopper import STEP
from pallas_kernels.routed_lora.steps import Steps

WORKERS = 2
ROWS = 64
"""Rows of a warpgroup."""
HEIGHT = WORKERS * ROWS
"""Rows of a program."""
PAIR = 2
"""Programs of a cluster: they have one right operand."""
WIDTH = 256
"""Columns of a tile: 128 registers of each thread hold its sums."""
STAGES = 4
"""Steps under way: 48 KB each."""
CLUSTERS = 66
"""The clusters that make a program for each multiprocessor of an H200."""


class Shared(NamedTuple):
    """Shared memory of a program.

    Attributes:
      left, right: what is copied, with a leading axis of steps under way.
      there, free: when it is, and when both programs may overwrite it.
      out: two pieces of 64 channels of each warpgroup's results, on their way.
    """

    left: Any
    right: Any
    there: Any
    free: Any
    out: Any


def sums_of_products(
    arrays: Sequence[Array],
    terms: Sequence[Sequence[Term]],
    *,
    transposed: bool = False,
    channels_first: Side = None,
    listed: Steps | None = None,
    interpret: Any,
) -> list[Float[Array, "B _ _"]]:
    """Return each output's sum of left right, in the arrays' dtype and summed in fp32.

    Args:
      arrays: left ones [B, T, K], right ones [K, N]; T is a multiple of 8, K and N are of 64.
      terms: of each output, which is [B, T, N].
      transposed: right arrays are [N, K].
      channels_first: left arrays are [B, K, T], or outputs are [B, N, T]; T is a multiple of 64.
      listed: the steps of each output's last term, for each row of tiles; None for all.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    arrays = vary_alike(*arrays)
    batch, *sizes = arrays[terms[0][0].left].shape
    length = sizes[1 if channels_first == "left" else 0]
    widths = [arrays[own[0].right].shape[0 if transposed else 1] for own in terms]
    columns = tuple(-(-width // WIDTH) for width in widths)
    each = -(-length // (PAIR * HEIGHT))
    own = tuple(map(tuple, terms))
    grid = Grid(own, batch * each, columns, transposed, each, channels_first, listed is not None)
    shapes = [(batch, *((n, length) if channels_first == "output" else (length, n))) for n in widths]
    given = [*arrays, *(listed or ())]
    kernel = mosaic_kernel(
        partial(_program, grid=grid, arrays=len(given)),
        out_type=[varying_like(arrays[0], shape, arrays[0].dtype) for shape in shapes],
        grid=(min(CLUSTERS, grid.ends()[-1]),),
        grid_names=("cluster",),
        cluster=(PAIR,),
        cluster_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        scratch_types=[scratch(arrays[0].dtype, transposed, left_first=channels_first == "left")],
        compiler_params=LANE,
        interpret=interpret,
        kernel_name="routed_lora_dx" if transposed else "routed_lora",
    )
    return kernel(*given)


def scratch(dtype: Any, transposed: bool, *, copies: int = 2, left_first: bool = False) -> Shared:
    """Return shared memory for steps that are copied in so many parts.

    Left has channels first, or not.
    """
    tiles = partial(tile_ref, dtype=dtype)

    return Shared(
        left=tiles(STAGES, *((STEP, HEIGHT) if left_first else (HEIGHT, STEP))),
        right=tiles(STAGES, *((WIDTH, STEP) if transposed else (STEP, WIDTH))),
        there=plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
        free=plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=WORKERS, num_barriers=STAGES),
        out=tiles(WORKERS, 2, ROWS, STEP),
    )


def _program(*refs: Any, grid: Grid, arrays: int) -> None:
    """Run a program's rows in every tile whose number modulo the clusters is its cluster's."""
    inputs, outputs, shared = refs[:arrays], refs[arrays:-1], refs[-1]
    listed = Steps(*inputs[-2:]) if grid.skips else None
    worker = lax.axis_index("warpgroup")

    @pl.when(worker == WORKERS)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _feed(inputs, shared, grid, listed)

    @pl.when(worker < WORKERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        _compute(outputs, shared, grid, listed, worker)


def _walk(grid: Grid, listed: Any, visit: Any) -> Array:
    """Call visit(place, its steps, those before) for each tile of the cluster.

    Returns the number of all its steps.
    """
    cluster, clusters = lax.axis_index("cluster"), lax.axis_size("cluster")
    ends = grid.ends()

    def advance(i: Array, before: Array) -> Array:
        place = place_of(grid, cluster + i * clusters)
        steps = pick(grid.steps(), place.output)
        if listed is not None:
            steps += listed.counts[place.row, place.output]
        visit(place, steps, before)
        return before + steps

    return lax.fori_loop(0, (ends[-1] - cluster + clusters - 1) // clusters, advance, jnp.int32(0))


def _feed(inputs: Sequence[Any], shared: Shared, grid: Grid, listed: Any) -> None:
    """Copy what each step multiplies as soon as there is a place for it."""

    def copy(place: Place, term: Term, block: Array, step: Array) -> None:
        slot, left, right = step % STAGES, inputs[term.left], inputs[term.right]
        pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
        row, first = _tokens(grid, place)
        box = _box(row, pl.ds(first, HEIGHT), pl.ds(term.start + block * STEP, STEP), grid, "left")
        plgpu.copy_gmem_to_smem(left.at[box], shared.left.at[slot], shared.there.at[slot])
        summed, kept = pl.ds(block * STEP, STEP), pl.ds(place.column * WIDTH, WIDTH)
        box = right.at[kept, summed] if grid.transposed else right.at[summed, kept]
        plgpu.copy_gmem_to_smem(box, shared.right.at[slot], shared.there.at[slot], collective_axes="program")

    def copy_listed(place: Place, term: Term, first: int, before: Array) -> None:
        lax.fori_loop(
            0,
            listed.counts[place.row, place.output],
            lambda i, _: copy(place, term, listed.order[place.row, first + i], before + i),
            None,
        )

    def visit(place: Place, _: Array, before: Array) -> None:
        for output, (terms, first) in enumerate(zip(grid.terms, grid.firsts(), strict=True)):

            @pl.when(place.output == output)
            def _(terms: tuple[Term, ...] = terms, first: int = first) -> None:
                done = before
                for term in terms[: len(terms) - grid.skips]:
                    lax.fori_loop(
                        0,
                        term.size // STEP,
                        lambda block, _, term=term, done=done: copy(place, term, block, done + block),
                        None,
                    )
                    done += term.size // STEP
                if grid.skips:
                    copy_listed(place, terms[-1], first, done)

    def drain(step: Array, _: None) -> None:
        plgpu.barrier_wait(shared.free.at[step % STAGES])

    steps = _walk(grid, listed, visit)
    lax.fori_loop(jnp.maximum(steps - STAGES, 0), steps, drain, None)


def _tokens(grid: Grid, place: Place) -> tuple[Array | int, Array]:
    """Return the row of a tile, and the first of the program's own tokens there."""
    row, tile = (0, place.row) if grid.each == grid.rows else (place.row // grid.each, place.row % grid.each)
    return row, (tile * PAIR + lax.axis_index("program")) * HEIGHT


def _box(row: Array | int, tokens: Any, channels: Any, grid: Grid, side: Side) -> tuple[Any, ...]:
    """Return indices of tokens and channels of a row."""
    return (row, channels, tokens) if grid.channels_first == side else (row, tokens, channels)


def _compute(outputs: Sequence[Any], shared: Shared, grid: Grid, listed: Any, worker: Array) -> None:
    """Compute a warpgroup's 64 rows of each tile."""

    def visit(place: Place, steps: Array, before: Array) -> None:
        total = pl.run_scoped(
            partial(
                multiply,
                shared=shared,
                transposed=grid.transposed,
                left_first=grid.channels_first == "left",
                worker=worker,
                before=before,
                steps=steps,
            ),
            plgpu.WGMMAAccumulatorRef((ROWS, WIDTH), jnp.float32),
        ).astype(outputs[0].dtype)
        row, first = _tokens(grid, place)
        tokens = pl.ds(first + worker * ROWS, ROWS)
        for i in range(WIDTH // STEP):
            piece = shared.out.at[worker, i % 2]
            # Store a piece past the output's last column too, to nowhere: stores are counted.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            own = total[:, i * STEP : (i + 1) * STEP]
            if grid.channels_first == "output":
                piece.T[...] = own
            else:
                piece[...] = own
            plgpu.commit_smem()
            box = _box(row, tokens, pl.ds(place.column * WIDTH + i * STEP, STEP), grid, "output")
            for output, ref in enumerate(outputs):
                store = partial(plgpu.copy_smem_to_gmem, piece, ref.at[box])
                pl.when(place.output == output)(store)

    _walk(grid, listed, visit)
    plgpu.wait_smem_to_gmem(0)


def multiply(
    total: Any,
    *,
    shared: Shared,
    transposed: bool,
    left_first: bool = False,
    worker: Array,
    before: Array,
    steps: Array,
) -> Float[Array, "64 256"]:
    """Multiply all steps of a tile, at least one.

    A place is free one step later, when the product that reads it has ended.
    """

    def advance(i: Array, _: None) -> None:
        slot = (before + i) % STAGES
        plgpu.barrier_wait(shared.there.at[slot])
        own, right = pl.ds(worker * ROWS, ROWS), shared.right.at[slot]
        left = shared.left.at[slot, :, own].T if left_first else shared.left.at[slot, own]
        plgpu.wgmma(total, left, right.T if transposed else right)
        plgpu.wgmma_wait(1)
        pl.when(i > 0)(lambda: plgpu.barrier_arrive(shared.free.at[(before + i - 1) % STAGES]))

    lax.fori_loop(0, steps, advance, None)
    found = total[...]
    plgpu.barrier_arrive(shared.free.at[(before + steps - 1) % STAGES])
    return found
