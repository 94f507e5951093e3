"""One pass of the Hopper kernel over memory, in the direction of time or against it.

A program takes one channel of a few rows and walks along time in tiles of 64 chunks of 64 steps. Chunks are the rows
of a matrix product: with U the tile [chunk, step] and S the states before each chunk [chunk, mode],

    W = U K^T                                      what a chunk adds to the states at its end
    S_c = sum_{c' < c} a^(c-1-c') W_c' + a^c s,    a = exp(64 log_poles), s the state before the tile
    Y = U T^T + S R^T

with T, K and R as in the README for chunks of 64. U stays in registers as the left operand. The sum over chunks takes
three rounds through shared memory, each joining four neighbours: 1, 4 and 16 chunks apart. Loads run two tiles ahead.
K, R and S enter products as sums of two bf16 numbers, 16 bits of each.

Against time, "before" is "after": steps, chunks and tiles are counted from the row's end. In the direction of time a
row may begin with a state.
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
from jaxtyping import Array, Float

from pallas_kernels._conv.gates import add_skip
from pallas_kernels._conv.tiles import STAGES, read, tile_ref
from pallas_kernels._conv.toeplitz import toeplitz
from pallas_kernels._hopper import CHUNK, as_chunks, as_rows, rows_per_program
from pallas_kernels.modal_conv.filter import modal_filter, powers
from pallas_kernels.modal_conv.hopper import MODES, ROWS

FAN = 4
"""Neighbours that a round of the sum over chunks joins: three rounds for 64 chunks."""

EDGE = (FAN - 1) * FAN * FAN
"""Rows of zeros before a tile's sums: as far as a round looks."""

Modes = tuple[Array, Array, Array | None]
"""log_poles, residues and the bias, all fp32."""


def convolve(
    x: Float[Array, "B D T"],
    modes: Modes,
    pre_gate: Float[Array, "B D T"] | None,
    post_gates: Sequence[Float[Array, "B D T"]],
    *,
    state: Float[Array, "B D M"] | None = None,
    reverse: bool = False,
    interpret: bool = False,
) -> list[Float[Array, "B D T"]]:
    """conv(pre_gate * x) times each of the post-gates, or as it is if there is none.

    Rows are matrices [chunk, step], padded if T is no multiple of 512; a tile that a row does not fill reads zeros, be
    it the last or, in a short row, the only one.

    Args:
      x: inputs.
      modes: see `Modes`.
      pre_gate: multiplies the input.
      post_gates: multiply the output; at most two.
      state: before the first step, zero if None.
      reverse: y_t = sum_{s >= t} h_{s-t} u_s, the transpose of the convolution.
      interpret: run on the CPU in Pallas' simulation of a GPU.
    """
    assert state is None or not reverse
    batch, channels, _ = x.shape
    streams = [as_chunks(z) for z in (x, pre_gate, *post_gates) if z is not None]
    outputs = max(1, len(post_gates))
    weights, decays = _weights(modes, x.dtype, reverse)
    rows = rows_per_program(batch, channels)
    # With 24 numbers per chunk, 4 rows lie in different banks. Two outputs leave no room for that, if two programs
    # are to fit on a multiprocessor.
    pitch = MODES + 8 if outputs == 1 else MODES
    results = plgpu.kernel(
        partial(
            _program,
            channels=channels,
            rows=rows,
            inputs=1 if pre_gate is None else 2,
            reverse=reverse,
            interpret=interpret,
        ),
        out_type=[jax.typeof(streams[0])] * outputs,
        grid=(channels, batch // rows),
        grid_names=("channel", "rows"),
        scratch_types=[
            tile_ref(STAGES, len(streams), ROWS, CHUNK, dtype=x.dtype),
            tile_ref(outputs, ROWS, CHUNK, dtype=x.dtype),
            tile_ref(*weights.shape[1:], dtype=x.dtype),
            plgpu.SMEM(decays.shape[1:], jnp.float32),
            plgpu.SMEM((EDGE + ROWS, pitch), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams), num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="modal_conv_reverse" if reverse else "modal_conv",
    )(*streams, weights, decays, *([] if state is None else [fill_up(state).reshape(-1, MODES)]))
    return [as_rows(y, x.shape) for y in results]


def _weights(modes: Modes, dtype: Any, reverse: bool) -> tuple[Array, Array]:
    """The right operands, transposed and on top of each other (T, R, K, `_matrices` cuts them), and a^0 ... a^63."""
    log_poles, residues = fill_up(modes[0], -1.0), fill_up(modes[1])
    steps, chunks = jnp.arange(CHUNK), jnp.arange(ROWS)
    within = within_chunks(modes)
    if reverse:
        steps, chunks, within = steps[::-1], chunks[::-1], jnp.swapaxes(within, 1, 2)
    read = halves_of_weights(jnp.swapaxes(residues[:, :, None] * powers(log_poles, steps + 1), 1, 2))
    written = halves_of_weights(powers(log_poles, CHUNK - 1 - steps))
    # Times [S_0, S_1, S_0, S_1], S = S_0 + S_1.
    read = jnp.concatenate([read[0], read[0], read[1], read[1]], 2)
    weights = jnp.concatenate([within, read, *written], 1).astype(dtype)
    return weights, jnp.swapaxes(powers(log_poles, CHUNK * chunks), 1, 2)


def fill_up(z: Float[Array, "... M"], value: float = 0.0) -> Float[Array, "... 16"]:
    """For 16 modes; those added weigh nothing."""
    missing = MODES - z.shape[-1]
    return jnp.pad(z, ((0, 0),) * (z.ndim - 1) + ((0, missing),), constant_values=value)


def within_chunks(modes: Modes) -> Float[Array, "D 64 64"]:
    """T with the bias on its diagonal."""
    log_poles, residues, bias = modes
    return toeplitz(add_skip(modal_filter(log_poles, residues, CHUNK), bias, 0), CHUNK, CHUNK, 0)


def halves_of_weights(z: Array) -> tuple[Array, Array]:
    """bf16 numbers whose sum has 16 bits of z. XLA may drop a cast to bf16 and back, but no `reduce_precision`."""
    high = lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)
    return high, z - high


def _program(*refs: Any, channels: int, rows: int, inputs: int, reverse: bool, interpret: bool) -> None:
    """One channel of `rows` rows, tile after tile, row after row."""
    loaded, stored, matrices, decay, sums, arrived, ready = refs[-7:]
    outputs, count = refs[-7 - stored.shape[0] : -7], loaded.shape[1]
    streams, (weights, decays, *states) = refs[:count], refs[count : -7 - len(outputs)]
    tiles = -(-streams[0].shape[1] // ROWS)
    channel, first = lax.axis_index("channel"), lax.axis_index("rows") * rows

    def box(ref: Any, step: Array) -> Any:
        tile = tiles - 1 - step % tiles if reverse else step % tiles
        return ref.at[(first + step // tiles) * channels + channel, pl.ds(tile * ROWS, ROWS)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for i, stream in enumerate(streams):
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, i], arrived.at[slot])

    def advance(step: Array, _: None) -> None:
        stage = [loaded.at[step % STAGES, i] for i in range(count)]
        plgpu.barrier_wait(arrived.at[step % STAGES])

        @pl.when(step % tiles == 0)
        def _() -> None:
            start_sums(sums, states[0].at[(first + step // tiles) * channels + channel] if states else None)

        out = _tile(stage[:inputs], matrices, decay, sums, reverse, interpret)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, gate in enumerate(stage[inputs:] or [None]):
            stored[i] = (out if gate is None else out * read(gate).astype(out.dtype)).astype(stored.dtype)
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))
        plgpu.commit_smem()
        for i, y in enumerate(outputs):
            plgpu.copy_smem_to_gmem(stored.at[i], box(y, step))

    plgpu.copy_gmem_to_smem(weights.at[channel], matrices, ready)
    plgpu.copy_gmem_to_smem(decays.at[channel], decay, ready)
    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    lax.fori_loop(0, rows * tiles, advance, None)
    plgpu.wait_smem_to_gmem(0)


def start_sums(sums: Any, state: Any = None) -> None:
    """Zeros, but for the state, which goes where that after a tile before this one would be."""
    nothing = plgpu.layout_cast(jnp.zeros((ROWS, MODES), sums.dtype), plgpu.Layout.WGMMA)
    sums[:ROWS, :MODES] = nothing
    if state is not None:
        chunk = plgpu.broadcasted_iota(jnp.int32, (ROWS, MODES), 0, layout=plgpu.Layout.WGMMA)
        nothing = jnp.where(chunk == ROWS - 1, row(state), nothing)
    sums[EDGE : EDGE + ROWS, :MODES] = nothing


def _tile(stage: list[Any], matrices: Any, decay: Any, sums: Any, reverse: bool, interpret: bool) -> Array:
    """One tile's Y in fp32; `stage` holds the input and, if there is one, its gate."""
    u = read(stage[0])
    for gate in stage[1:]:
        u = u * read(gate)
    within, reading, *written = _matrices(matrices)
    states = _states(products([(u, half) for half in written], interpret), sums, decay, reverse)
    quarters = jnp.concatenate(2 * halves(states, u.dtype), 1)
    return products([(u, within), (quarters, reading)], interpret)


def _matrices(matrices: Any) -> list[Any]:
    """T, R and the two halves of K, transposed, in shared memory."""
    edges = (0, CHUNK, 2 * CHUNK, 2 * CHUNK + MODES, 2 * CHUNK + 2 * MODES)
    return [matrices.at[start:stop] for start, stop in pairwise(edges)]


def _states(written: Array, sums: Any, decay: Any, reverse: bool) -> Array:
    """The state before each chunk. In the last row of `sums` is that before the tile, on return that after it."""
    tile = slice(0, ROWS) if reverse else slice(EDGE, EDGE + ROWS)
    last = 0 if reverse else EDGE + ROWS - 1

    def earlier(chunks: int) -> Array:
        """What was stored for as many chunks before, zero before the tile."""
        start = chunks if reverse else EDGE - chunks
        return plgpu.load(sums.at[start : start + ROWS, :MODES], layout=plgpu.Layout.WGMMA, optimized=False)

    def power(chunks: int) -> Array:
        return row(decay.at[ROWS - 1 - chunks if reverse else chunks])

    ages = plgpu.load(decay, layout=plgpu.Layout.WGMMA, optimized=False)
    carried = ages * row(sums.at[last, :MODES])
    sums[tile, :MODES] = written
    joined = earlier(1)
    for k in range(1, FAN):
        joined = joined + power(k) * earlier(1 + k)
    for distance in (FAN, FAN * FAN):
        sums[tile, :MODES] = joined
        for k in range(1, FAN):
            joined = joined + power(k * distance) * earlier(k * distance)
    states = joined + carried
    sums[tile, :MODES] = power(1) * states + written
    return states


def by_mode(ref: Any) -> Array:
    """One number per mode."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def row(ref: Any) -> Array:
    """One number per mode, the same for all chunks."""
    return lax.broadcast_in_dim(by_mode(ref), (ROWS, MODES), (1,))


def halves(states: Array, dtype: Any) -> list[Array]:
    """bf16 numbers whose sum is S, the first its upper 16 bits: XLA may drop a cast to bf16 and back."""
    bits = lax.bitcast_convert_type(states, jnp.int32)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), states.dtype)
    return [high.astype(dtype), (states - high).astype(dtype)]


def products(pairs: Sequence[tuple[Array, Any]], interpret: bool) -> Array:
    """sum A B^T in fp32, A in registers, B in shared memory."""
    if interpret:  # The simulation knows no product whose left operand is in registers.
        products = [jnp.dot(a, b[...].T, preferred_element_type=jnp.float32) for a, b in pairs]
        return sum(products[1:], products[0])

    def accumulate(total: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.T)
        return total[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, pairs[0][1].shape[0]), jnp.float32))
