"""Hopper: one pass over memory; products on tensor cores, states carried in fp32.

A program takes one channel of a few rows and walks along time in tiles of 64 chunks of 64 steps. Chunks are the rows
of a matrix product: with U the tile [chunk, step] and S the states before each chunk [chunk, mode],

    W = U K^T                                      what a chunk adds to the states at its end
    S_c = sum_{c' < c} a^(c-1-c') W_c' + a^c s,    a = exp(64 log_poles), s the state before the tile
    Y = U T^T + S R^T

with T, K and R as in the README for chunks of 64. U stays in registers as the left operand. The sum over chunks takes
three rounds through shared memory, each joining four neighbours: 1, 4 and 16 chunks apart. Loads run `stages` tiles
ahead. K, R and S enter products as sums of two bf16 numbers, 16 bits of each.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels.blocked_conv.packed import fit
from pallas_kernels.blocked_conv.toeplitz import toeplitz
from pallas_kernels.modal_conv.filter import modal_filter, powers
from pallas_kernels.modal_conv.hopper import CHUNK, MODES, ROWS
from pallas_kernels.modal_conv.xla import modal_conv_xla
from pallas_kernels.short_conv.gates import add_skip

STAGES = 2
PROGRAMS = 1056
"""Enough programs for four waves of two on each of an H200's 132 multiprocessors; rows beyond share a program."""

FAN = 4
"""Neighbours that a round of the sum over chunks joins: three rounds for 64 chunks."""

EDGE = ROWS
"""Rows above the sums of a tile's chunks, zero: a round looks at most 3 * 16 chunks back."""

PITCH = MODES + 8
"""Elements per chunk in the sums' buffer: 4 rows of 96 bytes lie in 4 different groups of banks."""

SWIZZLED = (
    plgpu.TilingTransform((8, CHUNK)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(2 * CHUNK),  # pyright: ignore[reportAbstractUsage]
)
"""How tensor cores and the copy engine want a tile in shared memory."""


def modal_conv_mosaic_gpu(
    x: Float[Array, "B D T"],
    log_poles: Float[Array, "D M"],
    residues: Float[Array, "D M"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: Float[Array, "B D M"] | None = None,
    output_final_state: bool = False,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    chunk_size: int = 128,
    stages: int = STAGES,
    interpret: bool = False,
) -> Float[Array, "B D T"]:
    """See `modal_conv`; what `hopper.why_not` refuses is not looked at again, and chunks are of 64.

    Args:
      stages: tiles whose loads are under way or in use at a time.
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    modes = [None if z is None else z.astype(jnp.float32) for z in (log_poles, residues, bias)]
    x, *modes, pre_gate, post_gate = vary_alike(x, *modes, pre_gate, post_gate)
    return _conv(x, tuple(modes), pre_gate, post_gate, stages, interpret)


Modes = tuple[Array, Array, Array | None]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _conv(
    x: Array, modes: Modes, pre_gate: Array | None, post_gate: Array | None, stages: int, interpret: bool
) -> Array:
    """Rows are matrices [chunk, step], padded if T is no multiple of 512; a last tile that is not full reads zeros."""
    batch, channels, length = x.shape
    chunks = -(-length // (8 * CHUNK)) * 8

    def matrix(z: Array) -> Array:
        return fit(z, chunks * CHUNK).reshape(batch * channels, chunks, CHUNK)

    streams = [matrix(z) for z in (x, pre_gate, post_gate) if z is not None]
    weights, decays = _weights(modes, x.dtype)
    shared = max(
        n for n in range(1, batch + 1) if (batch % n == 0 and channels * batch >= n * PROGRAMS) or n == 1
    )
    tile = partial(plgpu.SMEM, dtype=x.dtype, transforms=SWIZZLED)
    y = plgpu.kernel(
        partial(
            _program,
            channels=channels,
            rows=shared,
            gated=(pre_gate is not None, post_gate is not None),
            interpret=interpret,
        ),
        out_type=jax.typeof(streams[0]),
        grid=(channels, batch // shared),
        grid_names=("channel", "rows"),
        scratch_types=[
            tile((stages, len(streams), ROWS, CHUNK)),
            tile((ROWS, CHUNK)),
            tile(weights.shape[1:]),
            plgpu.SMEM(decays.shape[1:], jnp.float32),
            plgpu.SMEM((EDGE + ROWS, PITCH), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=stages),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="modal_conv",
    )(*streams, weights, decays)
    return y.reshape(batch, channels, chunks * CHUNK)[..., :length]


def _weights(modes: Modes, dtype: Any) -> tuple[Array, Array]:
    """The right operands, transposed and on top of each other (T, R, K, `_matrices` cuts them), and a^0 ... a^63."""
    log_poles, residues, bias = modes
    missing = ((0, 0), (0, MODES - log_poles.shape[1]))
    log_poles, residues = jnp.pad(log_poles, missing, constant_values=-1.0), jnp.pad(residues, missing)
    steps = jnp.arange(CHUNK)
    within = toeplitz(add_skip(modal_filter(log_poles, residues, CHUNK), bias, 0), CHUNK, CHUNK, 0)
    read = _halves(jnp.swapaxes(residues[:, :, None] * powers(log_poles, steps + 1), 1, 2))
    written = _halves(powers(log_poles, CHUNK - 1 - steps))
    # Times [S_0, S_1, S_0, S_1], S = S_0 + S_1.
    read = jnp.concatenate([read[0], read[0], read[1], read[1]], 2)
    weights = jnp.concatenate([within, read, *written], 1).astype(dtype)
    return weights, jnp.swapaxes(powers(log_poles, CHUNK * jnp.arange(ROWS)), 1, 2)


def _halves(z: Array) -> tuple[Array, Array]:
    """bf16 numbers whose sum has 16 bits of z. XLA may drop a cast to bf16 and back, but no `reduce_precision`."""
    high = lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)
    return high, z - high


def _program(*refs: Any, channels: int, rows: int, gated: tuple[bool, bool], interpret: bool) -> None:
    """One channel of `rows` rows, tile after tile, row after row."""
    *streams, weights, decays, y, loaded, stored, matrices, decay, sums, arrived, ready = refs
    pre_gated, post_gated = gated
    stages, dtype = loaded.shape[0], y.dtype
    tiles = -(-y.shape[1] // ROWS)
    channel, first = lax.axis_index("channel"), lax.axis_index("rows") * rows

    def box(ref: Any, step: Array) -> Any:
        return ref.at[(first + step // tiles) * channels + channel, pl.ds(step % tiles * ROWS, ROWS)]

    def load(step: Array) -> None:
        slot = step % stages
        for i, stream in enumerate(streams):
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, i], arrived.at[slot])

    def advance(step: Array, _: None) -> None:
        slot = step % stages
        plgpu.barrier_wait(arrived.at[slot])

        @pl.when(step % tiles == 0)
        def _() -> None:
            sums[...] = jnp.zeros(sums.shape, sums.dtype)

        u = plgpu.load(loaded.at[slot, 0], layout=plgpu.Layout.WGMMA)
        if pre_gated:
            u = u * plgpu.load(loaded.at[slot, 1], layout=plgpu.Layout.WGMMA)
        within, read, *written = _matrices(matrices)
        states = _states(_products([(u, written[0]), (u, written[1])], interpret), sums, decay)
        out = _products([(u, within), (_four_halves(states, dtype), read)], interpret)
        if post_gated:
            gate = plgpu.load(loaded.at[slot, len(streams) - 1], layout=plgpu.Layout.WGMMA)
            out = out * gate.astype(out.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stored[...] = out.astype(dtype)
        pl.when(step + stages < rows * tiles)(lambda: load(step + stages))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored, box(y, step))

    plgpu.copy_gmem_to_smem(weights.at[channel], matrices, ready)
    plgpu.copy_gmem_to_smem(decays.at[channel], decay, ready)
    lax.fori_loop(0, min(stages, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    lax.fori_loop(0, rows * tiles, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _matrices(matrices: Any) -> list[Any]:
    """T, R and the two halves of K, transposed, in shared memory."""
    edges = (0, CHUNK, 2 * CHUNK, 2 * CHUNK + MODES, 2 * CHUNK + 2 * MODES)
    return [matrices.at[start:stop] for start, stop in pairwise(edges)]


def _states(written: Array, sums: Any, decay: Any) -> Array:
    """The state before each chunk. The last row of `sums` holds that before the tile, then that after it."""

    def earlier(chunks: int) -> Array:
        """Row c is what was stored for chunk c - chunks, zero before the tile."""
        start = EDGE - chunks
        return plgpu.load(sums.at[start : start + ROWS, :MODES], layout=plgpu.Layout.WGMMA, optimized=False)

    def row(ref: Any) -> Array:
        values = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        return lax.broadcast_in_dim(values, (ROWS, MODES), (1,))

    ages = plgpu.load(decay, layout=plgpu.Layout.WGMMA, optimized=False)
    carried = ages * row(sums.at[EDGE + ROWS - 1, :MODES])
    sums[EDGE:, :MODES] = written
    joined = earlier(1)
    for k in range(1, FAN):
        joined = joined + row(decay.at[k]) * earlier(1 + k)
    for distance in (FAN, FAN * FAN):
        sums[EDGE:, :MODES] = joined
        for k in range(1, FAN):
            joined = joined + row(decay.at[k * distance]) * earlier(k * distance)
    states = joined + carried
    sums[EDGE:, :MODES] = row(decay.at[1]) * states + written
    return states


def _four_halves(states: Array, dtype: Any) -> Array:
    """[S_0, S_1, S_0, S_1] with S_0 + S_1 = S, S_0 the upper 16 bits of S: XLA may drop a cast to bf16 and back."""
    bits = lax.bitcast_convert_type(states, jnp.int32)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), states.dtype)
    halves = [high.astype(dtype), (states - high).astype(dtype)]
    return jnp.concatenate([*halves, *halves], 1)


def _products(pairs: Sequence[tuple[Array, Any]], interpret: bool) -> Array:
    """sum A B^T in fp32, A in registers, B in shared memory."""
    if interpret:  # The simulation knows no product whose left operand is in registers.
        products = [jnp.dot(a, b[...].T, preferred_element_type=jnp.float32) for a, b in pairs]
        return sum(products[1:], products[0])

    def accumulate(total: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.T)
        return total[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, pairs[0][1].shape[0]), jnp.float32))


def _forward(
    x: Array, modes: Modes, pre_gate: Array | None, post_gate: Array | None, stages: int, interpret: bool
) -> tuple[Array, tuple[Array, Modes, Array | None, Array | None]]:
    return _conv(x, modes, pre_gate, post_gate, stages, interpret), (x, modes, pre_gate, post_gate)


def _backward(stages: int, interpret: bool, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    """That of the XLA form, computed anew."""

    def run(x: Array, modes: Modes, pre_gate: Array | None, post_gate: Array | None) -> Any:
        log_poles, residues, bias = modes
        return modal_conv_xla(x, log_poles, residues, bias=bias, pre_gate=pre_gate, post_gate=post_gate)

    _, pull = jax.vjp(run, *residuals)
    return pull(g)


_conv.defvjp(_forward, _backward)
