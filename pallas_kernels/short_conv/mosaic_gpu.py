"""Hopper: one pass over memory, each step's inputs read from shared memory once a tap.

A program takes one channel of a few rows and walks along time in tiles. u = pre_gate * x is written, as fp32, below the
last steps of the tile before. From there it is read K times, each time one step higher. Neighbouring threads read
neighbouring words, so no two of them ask the same bank.
"""

import operator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator, add_skip
from pallas_kernels._hopper import CHUNK, as_chunks, as_rows, rows_per_program
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.short_conv.hopper import STEPS
from pallas_kernels.short_conv.xla import short_conv_xla

STAGES = 2
"""Tiles whose loads are under way or in use at a time."""

EDGE = 128
"""Steps kept of the tile before: one a thread, the least that all of them move together."""


def short_conv_mosaic_gpu(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    history: Float[Array, "B D K-1"] | None = None,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B D T"]:
    """Compute `short_conv`; what `hopper.why_not` refuses is not checked again.

    Args:
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    weights = add_skip(taps.astype(accumulator(x.dtype)), bias, 0)
    return _conv(*vary_alike(x, weights, pre_gate, post_gate), interpret)


@partial(OwnGradient, nondiff_argnums=(4,))
def _conv(x: Array, taps: Array, pre_gate: Array | None, post_gate: Array | None, interpret: bool) -> Array:
    batch, channels, _ = x.shape
    streams = [as_chunks(z) for z in (x, pre_gate, post_gate) if z is not None]
    rows = rows_per_program(batch, channels)
    tile = (STEPS // CHUNK, CHUNK)
    y = mosaic_kernel(
        partial(_program, gated=(pre_gate is not None, post_gate is not None), channels=channels, rows=rows),
        out_type=jax.typeof(streams[0]),
        grid=(channels, batch // rows),
        grid_names=("channel", "rows"),
        scratch_types=[
            plgpu.SMEM((STAGES, len(streams), *tile), x.dtype),
            plgpu.SMEM(tile, x.dtype),
            plgpu.SMEM((EDGE + STEPS,), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=STAGES),
        ],
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="short_conv",
    )(*streams, taps)
    return as_rows(y, x.shape)


def _program(*refs: Any, gated: tuple[bool, bool], channels: int, rows: int) -> None:
    """Run one channel of `rows` rows, tile after tile, row after row."""
    *streams, taps, y, loaded, stored, history, arrived = refs
    chunks = stored.shape[0]
    tiles, rest = -(-y.shape[1] // chunks), y.shape[1] % chunks
    channel, first = lax.axis_index("channel"), lax.axis_index("rows") * rows
    weights = [taps[channel, k] for k in range(taps.shape[1])]

    def box(ref: Any, step: Array, size: int = chunks) -> Any:
        return ref.at[(first + step // tiles) * channels + channel, pl.ds(step % tiles * chunks, size)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for i, stream in enumerate(streams):
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, i], arrived.at[slot])

    def store(step: Array, size: int) -> None:
        plgpu.copy_smem_to_gmem(stored.at[:size], box(y, step, size))

    def advance(step: Array, _: None) -> None:
        stage = loaded.at[step % STAGES]
        plgpu.barrier_wait(arrived.at[step % STAGES])
        last = history[STEPS:]
        history[:EDGE] = jnp.where(step % tiles == 0, jnp.zeros_like(last), last)
        history[EDGE:] = _input(stage, gated[0])
        products = [weight * _delayed(history, k) for k, weight in enumerate(weights)]
        out = reduce(operator.add, products)
        if gated[1]:
            gate = plgpu.load(stage.at[len(streams) - 1], layout=_one_by_one(chunks, CHUNK))
            out = out * gate.reshape(STEPS).astype(out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stored[...] = out.astype(stored.dtype).reshape(stored.shape)
        plgpu.commit_smem()
        # Clip here: past a row's end the next row begins, and a copy of plain memory is not clipped there.
        full = step % tiles < y.shape[1] // chunks
        pl.when(full)(lambda: store(step, chunks))
        if rest:
            pl.when(~full)(lambda: store(step, rest))
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))

    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    lax.fori_loop(0, rows * tiles, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _one_by_one(*shape: int) -> Any:
    """Give each thread of 128 every 128th step.

    No two of a warp ask the same bank, whatever the delay.
    """
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def _delayed(history: Any, k: int) -> Array:
    """Return u of the tile, k steps earlier."""
    return plgpu.load(history.at[EDGE - k : EDGE - k + STEPS], layout=_one_by_one(STEPS))


def _input(stage: Any, gated: bool) -> Array:
    """Return u in fp32, eight neighbouring steps a thread."""
    u = stage[0]
    if gated:
        u = u * stage[1]
    return u.astype(jnp.float32).reshape(STEPS)


def _forward(
    x: Array, taps: Array, pre_gate: Array | None, post_gate: Array | None, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array | None, Array | None]]:
    return _conv(x, taps, pre_gate, post_gate, interpret), (x, taps, pre_gate, post_gate)


def _backward(interpret: bool, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    """Return the gradients of the XLA form.

    On an H200 it was faster than a kernel in reverse time (see the README).
    """

    def run(x: Array, taps: Array, pre_gate: Array | None, post_gate: Array | None) -> Array:
        return short_conv_xla(x, taps, pre_gate=pre_gate, post_gate=post_gate)

    del interpret
    return jax.vjp(run, *residuals)[1](g)


_conv.defvjp(_forward, _backward)
