"""Hopper: gradients of x, pre_gate and the taps in one pass over memory, from the end of a row to its beginning.

With g = post_gate * dy and u = pre_gate * x,

    du_t = sum_k taps_k g_{t+k},    dx = pre_gate * du,    dpre_gate = x * du,    dtaps_k = sum_t u_t g_{t+k}.

g is written, as fp32, above the first steps of the tile after, from where it is read K times. The sums over t stay
with the threads until the program ends; XLA adds up the programs of a channel, always in the same order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import CHUNK, as_chunks, as_rows, rows_per_program, varying_like
from pallas_kernels.short_conv.hopper import STEPS
from pallas_kernels.short_conv.tiles import EDGE, STAGES, one_by_one, read_at, spread, sum_of_products

PART = 1024
"""Steps summed at a time: with eight taps, their running sums take 64 registers a thread."""

DY, POST, X, PRE = range(4)
"""Places of the streams in a stage. That of a gate which is not there is not loaded."""


def input_gradients(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    pre_gate: Float[Array, "B D T"] | None,
    post_gate: Float[Array, "B D T"] | None,
    dy: Float[Array, "B D T"],
    *,
    interpret: bool,
) -> tuple[Float[Array, "B D T"], Float[Array, "D K"], Float[Array, "B D T"] | None]:
    """Gradients of x, of the taps (in fp32) and of pre_gate, where y = post_gate * conv(pre_gate * x, taps)."""
    streams = {DY: dy, POST: post_gate, X: x, PRE: pre_gate}
    chunked = {place: as_chunks(z) for place, z in streams.items() if z is not None}
    dtaps, *gradients = _kernel(chunked, taps, x.shape[0], interpret)
    dx, *rest = (as_rows(z, x.shape) for z in gradients)
    return dx, dtaps.sum(1), rest[0] if rest else None


def _kernel(streams: dict[int, Array], taps: Array, batch: int, interpret: bool) -> list[Array]:
    """[the gradient of the taps in each program, that of x, that of pre_gate if there is one]."""
    x, (channels, count) = streams[X], taps.shape
    rows, outputs, tile = rows_per_program(batch, channels), 1 + (PRE in streams), (STEPS // CHUNK, CHUNK)
    return plgpu.kernel(
        partial(_program, places=tuple(streams), channels=channels, rows=rows),
        out_type=[
            varying_like(x, (channels, batch // rows, count), jnp.float32),
            *[jax.typeof(x)] * outputs,
        ],
        grid=(channels, batch // rows),
        grid_names=("channel", "rows"),
        scratch_types=[
            plgpu.SMEM((STAGES, 4, *tile), x.dtype),
            plgpu.SMEM((outputs, *tile), x.dtype),
            plgpu.SMEM((STEPS + EDGE,), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=STAGES),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="short_conv_vjp",
    )(*streams.values(), taps)


def _program(*refs: Any, places: tuple[int, ...], channels: int, rows: int) -> None:
    """One channel of `rows` rows, each from its last tile to its first, row after row."""
    streams, (taps, dtaps, *outputs) = dict(zip(places, refs, strict=False)), refs[len(places) : -4]
    loaded, stored, future, arrived = refs[-4:]
    chunks = stored.shape[1]
    tiles, count = -(-streams[X].shape[1] // chunks), taps.shape[1]
    channel, group = lax.axis_index("channel"), lax.axis_index("rows")
    weights = [taps[channel, k] for k in range(count)]

    def box(ref: Any, step: Array) -> Any:
        row, tile = group * rows + step // tiles, tiles - 1 - step % tiles
        return ref.at[row * channels + channel, pl.ds(tile * chunks, chunks)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for place, stream in streams.items():
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, place], arrived.at[slot])

    def advance(step: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        stage = loaded.at[step % STAGES]
        plgpu.barrier_wait(arrived.at[step % STAGES])
        first = future[:EDGE]
        future[STEPS:] = jnp.where(step % tiles == 0, jnp.zeros_like(first), first)
        future[:STEPS] = _cotangent(stage, places)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part in range(STEPS // PART):
            sums = _advance_part(part, sums, weights, stage, future, stored)
        plgpu.commit_smem()
        for i, output in enumerate(outputs):
            plgpu.copy_smem_to_gmem(stored.at[i], box(output, step))
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))
        return sums

    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    nothing = plgpu.layout_cast(jnp.zeros((PART,), jnp.float32), one_by_one(PART))
    sums = lax.fori_loop(0, rows * tiles, advance, (nothing,) * count)
    for k, total in enumerate(sums):
        dtaps[channel, group, k] = jnp.sum(total)
    plgpu.wait_smem_to_gmem(0)


def _cotangent(stage: Any, places: tuple[int, ...]) -> Array:
    """g in fp32, eight neighbouring steps a thread."""
    g = stage[DY].astype(jnp.float32)
    if POST in places:
        g = g * stage[POST].astype(jnp.float32)
    return g.reshape(STEPS)


def _advance_part(
    part: int, sums: tuple[Array, ...], weights: list[Array], stage: Any, future: Any, stored: Any
) -> tuple[Array, ...]:
    """Gradients of one part of a tile, left in `stored`, and the sums with the part's terms added."""
    chunks, first = PART // CHUNK, part * PART
    here = slice(part * chunks, (part + 1) * chunks)
    ahead = read_at(future, range(first, first + len(weights)), PART)
    du = sum_of_products(weights, ahead)
    factors = [spread(stage.at[X, here])]
    u = factors[0]
    if stored.shape[0] == 2:
        factors.insert(0, spread(stage.at[PRE, here]))
        u = u * factors[0]
    for i, factor in enumerate(factors if len(factors) == 2 else [None]):
        gradient = du if factor is None else du * factor.astype(jnp.float32)
        stored[i, here] = gradient.astype(stored.dtype).reshape(chunks, CHUNK)
    wide = u.astype(jnp.float32)
    return tuple(total + wide * g for total, g in zip(sums, ahead, strict=True))
