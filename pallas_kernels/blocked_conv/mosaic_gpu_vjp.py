"""Hopper: gradients of x, pre_gate and the filter in one pass over memory, from the end of a row to its beginning.

With G = post_gate * dy and U = pre_gate * x, tiles [chunk, step], and G_l the tile l chunks later,

    dU = G_0 M_0^T + G_1 M_1^T + G_2 M_2^T,    dx = pre_gate * dU,    dpre_gate = x * dU,
    dM_l^T = sum over tiles of G_l^T U,        dh[k] = the sum of dM_l[j, i] over 64 l + i - j = k.

dM_l stays in registers, in fp32, until the program ends; XLA sums programs and diagonals, always in the same order.
For that product G_l and U lie in shared memory once more: G_0 and G_1 where dy and post_gate were loaded to, G_2 and
U where G was shifted before and dx and dpre_gate will be. Two programs fit on a multiprocessor only by that.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import as_chunks, as_rows, rows_per_program, varying_like
from pallas_kernels.blocked_conv.hopper import CHUNK, LAGS, REACH, ROWS
from pallas_kernels.blocked_conv.tiles import (
    PITCH,
    STAGES,
    add_products,
    block_of,
    matrices,
    read,
    read_shifted,
    sum_of_products,
    tile_ref,
    zeros,
)

DY, POST, X, PRE = range(4)
"""Places of the streams in a stage. That of a gate which is not there is not loaded."""


def input_gradients(
    x: Float[Array, "B D T"],
    h: Float[Array, "D F"],
    pre_gate: Float[Array, "B D T"] | None,
    post_gate: Float[Array, "B D T"] | None,
    dy: Float[Array, "B D T"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "B D T"], Float[Array, "D F"], Float[Array, "B D T"] | None]:
    """Gradients of x, of h (in fp32) and of pre_gate, where y = post_gate * conv(pre_gate * x, h)."""
    streams = {DY: dy, POST: post_gate, X: x, PRE: pre_gate}
    chunked = {place: as_chunks(z) for place, z in streams.items() if z is not None}
    dmatrices, *gradients = _kernel(chunked, matrices(h.astype(x.dtype)), x.shape[0], interpret)
    _, pull = jax.vjp(matrices, h)
    (dh,) = pull(dmatrices.reshape(h.shape[0], -1, *dmatrices.shape[1:]).sum(1))
    dx, *rest = (as_rows(z, x.shape) for z in gradients)
    return dx, dh, rest[0] if rest else None


def _kernel(streams: dict[int, Array], taps: Array, batch: int, interpret: bool) -> list[Array]:
    """[the gradient of `taps` in each program, that of x, that of pre_gate if there is one]."""
    x, channels = streams[X], taps.shape[0]
    rows = rows_per_program(batch, channels)
    partial_sums = varying_like(x, (channels * batch // rows, CHUNK, (REACH + 1) * CHUNK), jnp.float32)
    return plgpu.kernel(
        partial(_program, places=tuple(streams), channels=channels, rows=rows, interpret=interpret),
        out_type=[partial_sums, jax.typeof(x), *[jax.typeof(x)] * (PRE in streams)],
        grid=(channels, batch // rows),
        grid_names=("channel", "rows"),
        scratch_types=[
            tile_ref(STAGES, 4, ROWS, CHUNK, dtype=x.dtype),
            plgpu.RefUnion(
                tile_ref(2, ROWS, CHUNK, dtype=x.dtype), plgpu.SMEM((ROWS + REACH, PITCH), x.dtype)
            ),
            tile_ref(*taps.shape[1:], dtype=x.dtype),
            plgpu.SMEM((REACH, CHUNK), x.dtype),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=STAGES),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="blocked_conv_vjp",
    )(*streams.values(), taps)


def _program(*refs: Any, places: tuple[int, ...], channels: int, rows: int, interpret: bool) -> None:
    """One channel of `rows` rows, each from its last tile to its first, row after row."""
    streams, (taps, dtaps, *outputs) = dict(zip(places, refs, strict=False)), refs[len(places) : -6]
    loaded, (spare, shifted), toeplitz, next_chunks, arrived, ready = refs[-6:]
    tiles = -(-streams[X].shape[1] // ROWS)
    channel, group = lax.axis_index("channel"), lax.axis_index("rows")

    def box(ref: Any, step: Array) -> Any:
        row, tile = group * rows + step // tiles, tiles - 1 - step % tiles
        return ref.at[row * channels + channel, pl.ds(tile * ROWS, ROWS)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for place, stream in streams.items():
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, place], arrived.at[slot])

    def advance(step: Array, dmatrices: tuple[Array, ...]) -> tuple[Array, ...]:
        stage = loaded.at[step % STAGES]
        plgpu.barrier_wait(arrived.at[step % STAGES])

        @pl.when(step % tiles == 0)
        def _() -> None:
            next_chunks[...] = jnp.zeros((REACH, CHUNK), next_chunks.dtype)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        later = _shifted_cotangents(stage, shifted, next_chunks, places)
        kept = [stage.at[DY], stage.at[POST], spare.at[0]]
        for ref, g in zip(kept, later, strict=True):
            ref[...] = g
        spare[1] = _input(stage, places)
        plgpu.commit_smem()
        dmatrices = add_products(dmatrices, kept, spare.at[1], interpret)
        du = sum_of_products(later, [toeplitz.at[:, block_of(lag)] for lag in LAGS], interpret)
        _store(du, stage, spare, [box(ref, step) for ref in outputs])
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))
        return dmatrices

    plgpu.copy_gmem_to_smem(taps.at[channel], toeplitz, ready)
    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    dmatrices = lax.fori_loop(0, rows * tiles, advance, tuple(zeros() for _ in LAGS))
    for lag, total in zip(LAGS, dmatrices, strict=True):
        dtaps[channel * lax.axis_size("rows") + group, :, block_of(lag)] = total
    plgpu.wait_smem_to_gmem(0)


def _shifted_cotangents(stage: Any, shifted: Any, next_chunks: Any, places: tuple[int, ...]) -> list[Array]:
    """G_0, G_1, G_2 of this tile; `next_chunks` are those of G after it, on return the first of it."""
    g = read(stage.at[DY])
    if POST in places:
        g = g * read(stage.at[POST])
    shifted[:ROWS, :CHUNK] = g
    shifted[ROWS:, :CHUNK] = next_chunks[...]
    next_chunks[...] = shifted[:REACH, :CHUNK]
    return [g, *(read_shifted(shifted, lag) for lag in LAGS[1:])]


def _input(stage: Any, places: tuple[int, ...]) -> Array:
    u = read(stage.at[X])
    return u * read(stage.at[PRE]) if PRE in places else u


def _store(du: Array, stage: Any, spare: Any, outputs: list[Any]) -> None:
    """dx, and dpre_gate if it is wanted, by way of `spare`."""
    factors = [stage.at[PRE], stage.at[X]] if len(outputs) == 2 else [None]
    for i, factor in enumerate(factors):
        gradient = du if factor is None else du * read(factor).astype(du.dtype)
        spare[i] = gradient.astype(spare.dtype)
    plgpu.commit_smem()
    for i, output in enumerate(outputs):
        plgpu.copy_smem_to_gmem(spare.at[i], output)
