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

Rows whose length is no multiple of 512 stay where they are (`_conv.flat_rows`). The tiles at a row's ends then hold
steps of its neighbours. Those are zeros to the products, and of such a tile only the row's chunks are written.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.documents import Marks
from pallas_kernels._conv.flat_rows import FlatRows, flatten, unflatten
from pallas_kernels._conv.flat_tiles import Edges, keep_own_steps, store_row
from pallas_kernels._conv.tile_documents import TileDocuments, marks_of
from pallas_kernels._conv.tiles import STAGES, chunks_ref, read
from pallas_kernels._hopper import CHUNK, as_chunks, as_rows, is_in_whole_boxes, rows_per_program
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel, tile_ref
from pallas_kernels.modal_conv.edges import Modes, run_edges, within_chunks
from pallas_kernels.modal_conv.filter import powers
from pallas_kernels.modal_conv.hopper import MODES, ROWS
from pallas_kernels.modal_conv.mosaic_gpu_rows import TileRows
from pallas_kernels.modal_conv.mosaic_gpu_weights import decays as decays_of
from pallas_kernels.modal_conv.mosaic_gpu_weights import rates, reading, writing

FAN = 4
"""Neighbours that a round of the sum over chunks joins: three rounds for 64 chunks."""

EDGE = (FAN - 1) * FAN * FAN
"""Rows of zeros before a tile's sums: as far as a round looks."""


def convolve(
    x: Float[Array, "B D T"],
    modes: Modes,
    pre_gate: Float[Array, "B D T"] | None,
    post_gates: Sequence[Float[Array, "B D T"]],
    *,
    state: Float[Array, "B D M"] | None = None,
    marks: Marks | None = None,
    reverse: bool = False,
    together: int = 1,
    interpret: bool = False,
) -> list[Float[Array, "B D T"]]:
    """Return conv(pre_gate * x) times each post-gate, or as it is if there is none.

    Rows are matrices [chunk, step] if T is a multiple of 512. A tile that a row does not fill reads zeros. It is the
    last one or, in a short row, the only one. Packed rows of other lengths are padded to that, others are not cut
    apart: see `_conv.flat_rows`.

    Args:
      x: inputs.
      modes: see `Modes`.
      pre_gate: multiplies the input.
      post_gates: multiply the output; at most two.
      state: before the first step, zero if None.
      marks: of packed rows; None for one document a row, without holes.
      reverse: y_t = sum_{s >= t} h_{s-t} u_s, the transpose of the convolution.
      together: rows that share a tile, see `hopper.rows_per_tile`; more than one only without state and marks.
      interpret: run on the CPU in Pallas' simulation of a GPU.
    """
    assert state is None or not reverse
    shared = TileRows(together, reverse) if together > 1 else None
    inputs = [x] if pre_gate is None else [x, pre_gate]
    given = [*inputs, *post_gates]
    if is_in_whole_boxes(x.shape[2]) or marks is not None:
        streams = [as_chunks(z) for z in given]
        found = _kernel(
            streams, len(inputs), modes, state, marks, (), None, shared, x.shape[:2], reverse, interpret
        )
        return [as_rows(y, x.shape) for y in found]
    flat, streams = FlatRows(x.shape[2], reverse), [flatten(z) for z in given]
    edges = []
    if flat.ragged:
        edges, state = _edges(flat, streams, len(inputs), modes, state, x.shape)
    found = _kernel(
        streams, len(inputs), modes, state, None, edges, flat, None, x.shape[:2], reverse, interpret
    )
    if reverse and x.size % CHUNK:  # The last row's edge lies in no other row's chunk.
        found = [y.at[-1].set(edge[-1]) for y, edge in zip(found, edges, strict=True)]
    return [unflatten(y, x.shape) for y in found]


def _edges(
    flat: FlatRows,
    streams: Sequence[Array],
    inputs: int,
    modes: Modes,
    state: Array | None,
    shape: tuple[int, ...],
) -> tuple[list[Float[Array, "R 64"]], Float[Array, "B D M"]]:
    """Return what each output holds in the chunks left to the caller, and the states behind."""
    parts = [flat.edges(z, shape) for z in streams]
    u, gates = math.prod(parts[1:inputs], start=parts[0]), parts[inputs:]
    y, left = run_edges(u, modes, reverse=flat.reverse, state=state, lengths=flat.edge_lengths(shape))
    outputs = [y * gate.astype(y.dtype) for gate in gates] or [y]
    return [z.astype(u.dtype).reshape(-1, CHUNK) for z in outputs], left


def _kernel(
    streams: Sequence[Array],
    inputs: int,
    modes: Modes,
    state: Array | None,
    marks: Marks | None,
    edges: Sequence[Array],
    flat: FlatRows | None,
    shared: TileRows | None,
    shape: tuple[int, ...],
    reverse: bool,
    interpret: bool,
) -> list[Array]:
    """Run `convolve` of streams in chunks.

    `inputs` of them are multiplied before the convolution, the others after it.
    """
    (batch, channels), x = shape, streams[0]
    outputs = max(1, len(streams) - inputs)
    weights, decays = (_weights if shared is None else _few_weights)(modes, x.dtype, reverse)
    rows, groups = divide(batch, channels, shared)
    # Use 24 numbers per chunk, so that 4 rows lie in different banks. Two outputs leave no room for that if two
    # programs are to fit on a multiprocessor.
    pitch = MODES + 8 if outputs == 1 else MODES
    stored = tile_ref(outputs, ROWS, CHUNK, dtype=x.dtype)
    if flat is not None:
        stored = plgpu.RefUnion(
            chunks_ref(outputs, ROWS, CHUNK, dtype=x.dtype), plgpu.SMEM((outputs, ROWS, CHUNK), x.dtype)
        )
    return mosaic_kernel(
        partial(
            _program,
            channels=channels,
            rows=rows,
            inputs=inputs,
            outputs=outputs,
            flat=flat,
            shared=shared,
            marked=len(marks_of(marks, reverse)),
            reverse=reverse,
            interpret=interpret,
        ),
        out_type=[jax.typeof(x)] * outputs,
        grid=(channels, groups),
        grid_names=("channel", "rows"),
        scratch_types=[
            (tile_ref if flat is None else chunks_ref)(STAGES, len(streams), ROWS, CHUNK, dtype=x.dtype),
            stored,
            tile_ref(weights.shape[1] if shared is None else 3 * CHUNK, CHUNK, dtype=x.dtype),
            plgpu.SMEM(decays.shape[1:], jnp.float32),
            plgpu.SMEM(((EDGE if shared is None else shared.edge) + ROWS, pitch), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams) * rows_in_tile(shared) + len(edges), num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2),
            *([plgpu.SMEM((STAGES, len(edges), CHUNK), x.dtype)] if edges else []),
        ],
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=("modal_conv_reverse" if reverse else "modal_conv") + form(flat, marks, shared),
    )(
        *streams,
        weights,
        decays,
        *marks_of(marks, reverse),
        *edges,
        *([] if state is None else [fill_up(state).reshape(-1, MODES)]),
    )


def rows_in_tile(shared: TileRows | None) -> int:
    """Count rows of one channel that a tile holds, or parts of."""
    return 1 if shared is None else shared.count


def divide(batch: int, channels: int, shared: TileRows | None) -> tuple[int, int]:
    """Return rows that one program takes, and programs for each channel.

    Several rows in a tile count as one.
    """
    rows = batch // rows_in_tile(shared)
    each = rows_per_program(rows, channels, fewer=1 if shared is None else 2)
    return each, rows // each


def form(flat: FlatRows | None, marks: Marks | None, shared: TileRows | None) -> str:
    """Return the end of a kernel's name."""
    if shared is not None:
        return "_shared"
    if marks is not None:
        return "_packed"
    return "" if flat is None else "_flat"


def _weights(modes: Modes, dtype: Any, reverse: bool) -> tuple[Array, Array]:
    """Return the right operands T, R, K, transposed and on top of each other, and a^0 ... a^63.

    `_matrices` cuts the operands.
    """
    log_poles, residues = fill_up(modes[0], -1.0), fill_up(modes[1])
    steps, chunks = jnp.arange(CHUNK), jnp.arange(ROWS)
    within = within_chunks(modes)
    if reverse:
        steps, chunks, within = steps[::-1], chunks[::-1], jnp.swapaxes(within, 1, 2)
    read = halves_of_weights(jnp.swapaxes(residues[:, :, None] * powers(log_poles, steps + 1), 1, 2))
    written = halves_of_weights(powers(log_poles, CHUNK - 1 - steps))
    # Repeat the halves: they are multiplied by [S_0, S_1, S_0, S_1], where S = S_0 + S_1.
    read = jnp.concatenate([read[0], read[0], read[1], read[1]], 2)
    weights = jnp.concatenate([within, read, *written], 1).astype(dtype)
    return weights, jnp.swapaxes(powers(log_poles, CHUNK * chunks), 1, 2)


def _few_weights(modes: Modes, dtype: Any, reverse: bool) -> tuple[Array, Array]:
    """Return T, and what `mosaic_gpu_weights` makes R, K and the powers of a from."""
    within = within_chunks(modes)
    within = jnp.swapaxes(within, 1, 2) if reverse else within
    return within.astype(dtype), rates(fill_up(modes[0], -1.0), fill_up(modes[1]))


def fill_up(z: Float[Array, "... M"], value: float = 0.0) -> Float[Array, "... 16"]:
    """Fill up to 16 modes; those added weigh nothing."""
    missing = MODES - z.shape[-1]
    return jnp.pad(z, ((0, 0),) * (z.ndim - 1) + ((0, missing),), constant_values=value)


def halves_of_weights(z: Array) -> tuple[Array, Array]:
    """Return bf16 numbers whose sum has 16 bits of z.

    XLA may drop a cast to bf16 and back, but no `reduce_precision`.
    """
    high = lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)
    return high, z - high


def _program(
    *refs: Any,
    channels: int,
    rows: int,
    inputs: int,
    outputs: int,
    flat: FlatRows | None,
    shared: TileRows | None,
    marked: int,
    reverse: bool,
    interpret: bool,
) -> None:
    """Run one channel of `rows` rows, or groups of rows that share a tile.

    It goes tile after tile, row after row.
    """
    refs, arriving = (refs[:-1], refs[-1]) if flat is not None and flat.ragged else (refs, None)
    loaded, stored, matrices, decay, sums, arrived, ready = refs[-7:]
    results, count = refs[-7 - outputs : -7], loaded.shape[1]
    streams, (weights, decays, *rest) = refs[:count], refs[count : -7 - outputs]
    marks, rest = rest[:marked], rest[marked:]
    edges, states = None, rest
    if flat is not None and flat.ragged:
        edges, states = Edges(flat, rest[:outputs], arriving), rest[outputs:]
    tiles = -(-streams[0].shape[1] // ROWS) if flat is None else flat.tiles
    channel, first = lax.axis_index("channel"), lax.axis_index("rows") * rows

    def line_of(step: Array) -> Array:
        return (first + step // tiles) * (rows_in_tile(shared) * channels) + channel

    def tile_of(step: Array) -> Array:
        return tiles - 1 - step % tiles if reverse else step % tiles

    def pairs(tile: Any, ref: Any, step: Array) -> list[tuple[Any, Any]]:
        """Return parts of a tile in shared memory, each with its place in device memory."""
        if shared is None:
            return [(tile, box(ref, step))]
        return list(zip(shared.parts(tile), shared.boxes(ref, line_of(step), channels), strict=True))

    def box(ref: Any, step: Array) -> Any:
        if flat is None:
            return ref.at[line_of(step), pl.ds(tile_of(step) * ROWS, ROWS)]
        return ref.at[pl.ds(flat.chunks(line_of(step))[0] + tile_of(step) * ROWS, ROWS)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for i, stream in enumerate(streams):
            for part, source in pairs(loaded.at[slot, i], stream, step):
                plgpu.copy_gmem_to_smem(source, part, arrived.at[slot])
        if edges is not None:
            edges.load(line_of(step), slot, arrived.at[slot])

    def put(kept: Sequence[Any], step: Array, found: Callable[[], Iterable[Array]]) -> None:
        """Put results into shared memory.

        Plain rows commit them after the next load: the simulation calls it a race.
        """
        for ref, y in zip(kept, found(), strict=True):
            ref[...] = y.astype(loaded.dtype)
        early = shared is not None or flat is not None or marked
        if early:
            plgpu.commit_smem()
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))
        if not early:
            plgpu.commit_smem()

    def results_of(step: Array, out: Array, gates: list[Any], cuts: TileDocuments | None) -> Iterable[Array]:
        """Yield outputs of a tile, with what `edges` has for the neighbour there."""
        found = _gated(out, gates)
        if edges is not None:
            place = (line_of(step), tile_of(step), step % STAGES)
            return (edges.join(i, y, *place) for i, y in enumerate(found))
        return found if cuts is None else map(cuts.tokens, found)

    def store(step: Array, found: Callable[[], Iterable[Array]]) -> None:
        kept = [stored.at[i] for i in range(outputs)]
        put(kept, step, found)
        for tile, result in zip(kept, results, strict=True):
            for part, target in pairs(tile, result, step):
                plgpu.copy_smem_to_gmem(part, target)

    def advance(step: Array, _: None) -> None:
        stage = [loaded.at[step % STAGES, i] for i in range(count)]
        documents = None
        if marked:  # Their way from device memory overlaps with that of the streams.
            where = (first + step // tiles, tile_of(step))
            documents = TileDocuments.load(marks, *where, reverse=reverse).read_ahead()
        plgpu.barrier_wait(arrived.at[step % STAGES])
        state = states[0].at[line_of(step)] if states else None
        place = (line_of(step), tile_of(step))
        mask = None if flat is None else partial(keep_own_steps, flat, *place)
        entry = None if flat is None or not reverse else flat.entry(*place)
        if shared is None:
            pl.when(step % tiles == 0)(lambda: start_sums(sums, state, reverse, entry))
        if documents is not None:
            out = _packed_tile(stage[:inputs], matrices, decay, sums, documents, interpret)
        else:
            out = _tile(stage[:inputs], matrices, decay, sums, reverse, interpret, entry, state, shared, mask)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        found = partial(results_of, step, out, stage[inputs:], documents)
        if flat is None:
            store(step, found)
        else:
            kept = ([tiles.at[i] for i in range(outputs)] for tiles in stored)
            whole, plain = ((tiles, partial(put, tiles, step, found)) for tiles in kept)
            store_row(flat, *place, results, whole=whole, plain=plain)

    plgpu.copy_gmem_to_smem(weights.at[channel], matrices if shared is None else matrices.at[:CHUNK], ready)
    plgpu.copy_gmem_to_smem(decays.at[channel], decay, ready)
    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    if shared is not None:
        matrices[CHUNK : 2 * CHUNK] = reading(decay, loaded.dtype, reverse=reverse)
        matrices[2 * CHUNK :] = writing(decay, loaded.dtype, reverse=reverse)
        plgpu.commit_smem()
        decay = decays_of(decay, shared.distances(FAN))
    lax.fori_loop(0, rows * tiles, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _gated(out: Array, gates: Sequence[Any]) -> list[Array]:
    return [out * read(gate).astype(out.dtype) for gate in gates] or [out]


def start_sums(sums: Any, state: Any = None, reverse: bool = False, entry: Array | None = None) -> None:
    """Start sums at zero, and the state where that behind a tile before this one would be.

    Against time it goes there only if the row fills its tiles, so that `entry` is 64; else `_states` puts it in.
    """
    nothing = plgpu.layout_cast(jnp.zeros((ROWS, MODES), sums.dtype), plgpu.Layout.WGMMA)
    tile, last = (slice(0, ROWS), 0) if reverse else (slice(EDGE, EDGE + ROWS), ROWS - 1)
    if reverse:
        sums[EDGE : EDGE + ROWS, :MODES] = nothing
    else:
        sums[:ROWS, :MODES] = nothing
    if state is not None:
        chunk = plgpu.broadcasted_iota(jnp.int32, (ROWS, MODES), 0, layout=plgpu.Layout.WGMMA)
        here = chunk == last if entry is None else (chunk == last) & (entry == ROWS)
        nothing = jnp.where(here, row(state), nothing)
    sums[tile, :MODES] = nothing


def _tile(
    stage: list[Any],
    matrices: Any,
    decay: Any,
    sums: Any,
    reverse: bool,
    interpret: bool,
    entry: Array | None = None,
    state: Any = None,
    shared: TileRows | None = None,
    mask: Callable[[Array], tuple[Array, ...]] | None = None,
) -> Array:
    """Return one tile's Y in fp32; `stage` holds the input and, if there is one, its gate.

    `_states` has `entry`, `state` and `shared`. `mask`: see `keep_own_steps`.
    """
    u = read(stage[0])
    for gate in stage[1:]:
        u = u * read(gate)
    (u,) = (u,) if mask is None else mask(u)
    within, reading, *written = _matrices(matrices)
    sent = products([(u, half) for half in written], interpret)
    states = _states(sent, sums, decay, reverse, entry, state, cuts=shared)
    quarters = jnp.concatenate(2 * halves(states, u.dtype), 1)
    return products([(u, within), (quarters, reading)], interpret)


def _packed_tile(
    stage: list[Any],
    matrices: Any,
    decay: Any,
    sums: Any,
    documents: TileDocuments,
    interpret: bool,
) -> Array:
    """Run `_tile` on packed rows.

    T takes the documents of a chunk one by one, as often as the tile needs.
    """
    u = read(stage[0])
    for gate in stage[1:]:
        u = u * read(gate)
    u = documents.tokens(u)
    within, reading, *written = _matrices(matrices)
    sent = documents.leaving(u)
    sent = products([(sent, half) for half in written], interpret)
    states = _states(sent, sums, decay, documents.reverse, cuts=documents)
    quarters = jnp.concatenate(2 * halves(states, u.dtype), 1)
    out = products([(documents.first(u), within), (quarters, reading)], interpret)
    return documents.cut_apart(out, lambda own: products([(own(u), within)], interpret))


def _matrices(matrices: Any) -> list[Any]:
    """Return T, R and the two halves of K, transposed, in shared memory."""
    edges = (0, CHUNK, 2 * CHUNK, 2 * CHUNK + MODES, 2 * CHUNK + 2 * MODES)
    return [matrices.at[start:stop] for start, stop in pairwise(edges)]


def _states(
    written: Array,
    sums: Any,
    decay: Any,
    reverse: bool,
    entry: Array | None = None,
    state: Any = None,
    cuts: TileDocuments | TileRows | None = None,
) -> Array:
    """Return the state before each chunk.

    The last row of `sums` is that before the tile, and on return that after it. Where a row that is walked against time
    ends before its tile does, `state` enters as what chunk `entry` has sent. Between documents (`cuts`) nothing passes,
    nor between rows that share a tile, which are carried to no other.
    """
    edge = sums.shape[0] - ROWS
    tile = slice(0, ROWS) if reverse else slice(edge, edge + ROWS)
    last = 0 if reverse else edge + ROWS - 1

    def earlier(chunks: int) -> Array:
        """Return what was stored for as many chunks before, zero before the tile."""
        start = chunks if reverse else edge - chunks
        return plgpu.load(sums.at[start : start + ROWS, :MODES], layout=plgpu.Layout.WGMMA, optimized=False)

    def power(chunks: int) -> Array:
        if isinstance(cuts, TileRows):
            return for_all_chunks(decay[chunks])
        return row(decay.at[ROWS - 1 - chunks if reverse else chunks])

    def linked(z: Array, chunks: int) -> Array:
        return z if cuts is None else cuts.linked(z, chunks)

    def join(joined: Array, distance: int, shift: int = 0) -> Array:
        for k in neighbours(distance, cuts):
            age, older = power(k * distance), earlier(shift + k * distance)
            joined = joined + age * linked(older, k * distance)
        return joined

    carried = None
    if not isinstance(cuts, TileRows):
        ages = plgpu.load(decay, layout=plgpu.Layout.WGMMA, optimized=False)
        carried = ages * row(sums.at[last, :MODES])
        carried = carried if cuts is None else cuts.linked_to_tile(carried)
    sums[tile, :MODES] = written
    if entry is not None and state is not None:

        @pl.when(entry < ROWS)
        def _() -> None:
            sums[entry, :MODES] = by_mode(state)

        written = earlier(0)
    joined = join(linked(earlier(1), 0), 1, 1)
    for distance in (FAN, FAN * FAN):
        if neighbours(distance, cuts):
            sums[tile, :MODES] = joined
            joined = join(joined, distance)
    if carried is None or isinstance(cuts, TileRows):
        return joined
    states = joined + carried
    kept = power(1) * states
    sums[tile, :MODES] = (kept if cuts is None else cuts.through(kept)) + written
    return states


def neighbours(distance: int, cuts: TileDocuments | TileRows | None) -> Sequence[int]:
    """Return how many times `distance` chunks back a round of the sum over chunks looks.

    It looks no further than a row reaches.
    """
    return cuts.neighbours(distance, FAN) if isinstance(cuts, TileRows) else range(1, FAN)


def by_mode(ref: Any) -> Array:
    """Read one number per mode."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)


def row(ref: Any, width: int = MODES) -> Array:
    """Read one number per mode (or step), the same for all chunks."""
    return for_all_chunks(by_mode(ref), width)


def for_all_chunks(z: Array, width: int = MODES) -> Array:
    """Repeat a row for all chunks."""
    return lax.broadcast_in_dim(z, (ROWS, width), (1,))


def halves(states: Array, dtype: Any) -> list[Array]:
    """Return bf16 numbers whose sum is S, the first its upper 16 bits.

    XLA may drop a cast to bf16 and back.
    """
    bits = lax.bitcast_convert_type(states, jnp.int32)
    high = lax.bitcast_convert_type(bits & jnp.int32(-65536), states.dtype)
    return [high.astype(dtype), (states - high).astype(dtype)]


def products(pairs: Sequence[tuple[Array, Any]], interpret: bool) -> Array:
    """Return sum A B^T in fp32, A in registers, B in shared memory."""
    if interpret:  # The simulation knows no product whose left operand is in registers.
        products = [jnp.dot(a, b[...].T, preferred_element_type=jnp.float32) for a, b in pairs]
        return sum(products[1:], products[0])

    def accumulate(total: Any) -> Array:
        for a, b in pairs:
            plgpu.wgmma(total, a, b.T)
        return total[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, pairs[0][1].shape[0]), jnp.float32))
