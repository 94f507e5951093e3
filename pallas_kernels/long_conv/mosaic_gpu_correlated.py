"""The Hopper kernel of conj(U) V, summed over a channel's rows, of spectra that lie in device memory.

A program takes one class of one channel and walks over its rows, `STAGES` of which are under way at a time. Both sums
stay in registers. So each spectrum is read once, and the sum has one order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.tiles import read, zeros
from pallas_kernels._hopper import CHUNK, ROWS, varying_like
from pallas_kernels._mosaic_gpu import tile_ref
from pallas_kernels.long_conv.mosaic_gpu_launch import launch

STAGES = 3
"""Rows whose tiles are on their way or in use at a time: 96 KB, so that two programs share a multiprocessor."""


class Shared(NamedTuple):
    """Shared memory: real and imaginary part of U, then of V, for each stage."""

    tiles: Any
    came: Any


def correlate(
    u: Float[Array, "R P 64 64"],
    v: Float[Array, "R P 64 64"],
    inverse: Float[Array, "R"],
    channels: int,
    *,
    interpret: bool,
) -> Float[Array, "D P 64 64"]:
    """Sum conj(U) V times `inverse` over rows, in fp32; row i is of channel i mod `channels`."""
    rows, parts = u.shape[0] // channels, u.shape[1]
    return launch(
        partial(_program, rows=rows, channels=channels),
        (u, v, inverse.astype(jnp.float32)),
        varying_like(u, (channels, parts, ROWS, CHUNK), jnp.float32),
        Shared(
            tiles=tile_ref(STAGES, 4, ROWS, CHUNK, dtype=jnp.float16),
            came=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        ),
        grid=(channels, parts // 2),
        axes=("channel", "class"),
        workers=1,
        name="correlated",
        interpret=interpret,
    )


def _program(u: Any, v: Any, inverse: Any, sums: Any, shared: Shared, *, rows: int, channels: int) -> None:
    channel, own = lax.axis_index("channel"), lax.axis_index("class")

    def load(step: Any, stage: Any) -> None:
        for i, spectrum in enumerate((u, u, v, v)):
            source = spectrum.at[step * channels + channel, 2 * own + i % 2]
            plgpu.copy_gmem_to_smem(source, shared.tiles.at[stage, i], shared.came.at[stage])

    def add(step: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        stage = lax.rem(step, STAGES)
        plgpu.barrier_wait(shared.came.at[stage])
        a, b, c, d = (read(shared.tiles.at[stage, i]).astype(jnp.float32) for i in range(4))
        scale = inverse[step * channels + channel]
        plgpu.commit_smem()  # All warps have read what the next row overwrites.
        pl.when(step + STAGES < rows)(lambda: load(step + STAGES, stage))
        real, imaginary = totals
        return real + (a * c + b * d) * scale, imaginary + (a * d - b * c) * scale

    for stage in range(min(STAGES, rows)):
        load(stage, stage)
    for i, total in enumerate(lax.fori_loop(0, rows, add, (zeros(), zeros()))):
        sums[channel, 2 * own + i] = total
