"""Hopper: gradients of modes, bias and first state in one pass over memory, from the end of a row to its beginning.

With G = post_gate * dy and U = pre_gate * x, tiles [chunk, step], and t(c) the last step of chunk c, let

    Q_c = sum_{n > t(c)} exp((n - t(c)) log_poles) G_n,    P_c the same with (n - t(c)) / 64 times each term.

What step j of chunk c adds to y_n is residues exp((n - t(c) + 63 - j) log_poles) u_j. So the gradients need only G^T U,
Q^T U and P^T U of the streams. These stay in registers, in fp32, until the program ends. Q and P are carried from chunk
to chunk as the states of the other passes are: with a = exp(64 log_poles),

    Q_{c-1} = a Q_c + V_c,    P_{c-1} = a (P_c + Q_c) + V'_c,    V = G K^T,    V' = G K'^T.

A row's first state s adds residues exp((n + 1) log_poles) s to y_n, for which Q_{-1} and P_{-1} are left at its end.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._conv.documents import Marks
from pallas_kernels._conv.flat_rows import FlatRows, flatten
from pallas_kernels._conv.flat_tiles import keep_own_steps
from pallas_kernels._conv.tile_documents import TileDocuments, marks_of
from pallas_kernels._conv.tiles import STAGES, add_products, chunks_ref, read, zeros
from pallas_kernels._hopper import CHUNK, as_chunks, is_in_whole_boxes, varying_like
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel, tile_ref
from pallas_kernels.modal_conv.edges import Modes, run_edges, within_chunks
from pallas_kernels.modal_conv.filter import powers
from pallas_kernels.modal_conv.hopper import MODES, ROWS
from pallas_kernels.modal_conv.mosaic_gpu_pass import (
    EDGE,
    FAN,
    by_mode,
    divide,
    fill_up,
    for_all_chunks,
    form,
    halves,
    halves_of_weights,
    neighbours,
    products,
    row,
    rows_in_tile,
    start_sums,
)
from pallas_kernels.modal_conv.mosaic_gpu_rows import TileRows
from pallas_kernels.modal_conv.mosaic_gpu_weights import decays as decays_of
from pallas_kernels.modal_conv.mosaic_gpu_weights import rates, writing_with_lags

DY, X, POST, PRE = range(4)
"""Places of the streams in a stage. That of a gate which is not there is not loaded."""

PITCH = MODES + 8


def gradient_of_modes(
    x: Float[Array, "B D T"],
    modes: Modes,
    state: Float[Array, "B D M"] | None,
    pre_gate: Float[Array, "B D T"] | None,
    post_gate: Float[Array, "B D T"] | None,
    dy: Float[Array, "B D T"],
    *,
    marks: Marks | None = None,
    together: int = 1,
    interpret: bool,
) -> tuple[Modes, Float[Array, "B D M"] | None]:
    """Return gradients of log_poles, residues, bias and the state.

    y = post_gate * conv(pre_gate * x). `together` rows share a tile, more than one only without state and marks.
    """
    streams = {
        place: z for place, z in zip(range(4), (dy, x, post_gate, pre_gate), strict=True) if z is not None
    }
    if is_in_whole_boxes(x.shape[2]) or marks is not None:
        chunked = {place: as_chunks(z) for place, z in streams.items()}
        shared = TileRows(together, reverse=True) if together > 1 else None
        return _gradient(chunked, modes, state, marks, x.shape[:2], None, interpret, shared)
    flat, chunked = FlatRows(x.shape[2]), {place: flatten(z) for place, z in streams.items()}
    if not flat.ragged:
        return _gradient(chunked, modes, state, None, x.shape[:2], flat, interpret)
    parts = {place: flat.edges(z, x.shape) for place, z in chunked.items()}
    u, g = (parts[z] * parts[gate] if gate in parts else parts[z] for z, gate in ((X, PRE), (DY, POST)))

    def edges(modes: Modes, state: Array | None) -> tuple[Array, Array]:
        return run_edges(u, modes, reverse=False, state=state, lengths=flat.edge_lengths(x.shape))

    (_, left), backward = jax.vjp(edges, modes, state)
    of_rest, dleft = _gradient(chunked, modes, left, None, x.shape[:2], flat, interpret)
    of_edges, dstate = backward((g.astype(jnp.float32), dleft))
    return jax.tree.map(jnp.add, of_rest, of_edges), dstate


def _gradient(
    streams: dict[int, Array],
    modes: Modes,
    state: Float[Array, "B D M"] | None,
    marks: Marks | None,
    shape: tuple[int, ...],
    flat: FlatRows | None,
    interpret: bool,
    shared: TileRows | None = None,
) -> tuple[Modes, Float[Array, "B D M"] | None]:
    """Return `gradient_of_modes` of streams in chunks."""
    log_poles, residues = fill_up(modes[0], -1.0), fill_up(modes[1])
    found, *before = _kernel(streams, log_poles, marks, shape[0], flat, shared, interpret)
    found = found.reshape(shape[1], -1, *found.shape[1:]).sum(1)
    _, vjp = jax.vjp(within_chunks, modes)
    ((dpoles, dresidues, dbias),) = vjp(found[:, :CHUNK])
    q, q_low, p, p_low = jnp.split(found[:, CHUNK:], 4, 1)
    left = CHUNK - 1 - jnp.arange(CHUNK)
    ages = powers(log_poles, left)
    lags = left[None, None].astype(jnp.float32) * (q + q_low) + CHUNK * (p + p_low)
    count = dpoles.shape[1]
    dpoles += (residues * (ages * lags).sum(2))[:, :count]
    dresidues += (ages * (q + q_low)).sum(2)[:, :count]
    if state is None:
        return (dpoles, dresidues, dbias), None
    first, lag = before[0].reshape(*shape, 2, MODES)[..., :count].swapaxes(0, 2)
    state = state.swapaxes(0, 1)
    dpoles += CHUNK * modes[1] * (state * lag).sum(1)
    dresidues += (state * first).sum(1)
    return (dpoles, dresidues, dbias), (modes[1][:, None] * first).swapaxes(0, 1)


def _kernel(
    streams: dict[int, Array],
    log_poles: Array,
    marks: Marks | None,
    batch: int,
    flat: FlatRows | None,
    shared: TileRows | None,
    interpret: bool,
) -> list[Array]:
    """Return G^T U, Q^T U and P^T U of each program, and [Q, P] before each row.

    Q^T U and P^T U are in two halves each. Rows that share a tile have no state before them: of those there is the
    first only.
    """
    x, channels = streams[X], log_poles.shape[0]
    rows, groups = divide(batch, channels, shared)
    weights = _weights(log_poles, x.dtype) if shared is None else [rates(log_poles)]
    loaded = kept = tile_ref(STAGES, 4, ROWS, CHUNK, dtype=x.dtype)
    if flat is not None:
        loaded = plgpu.RefUnion(chunks_ref(STAGES, 4, ROWS, CHUNK, dtype=x.dtype), kept)
    return mosaic_kernel(
        partial(
            _program,
            places=tuple(streams),
            channels=channels,
            rows=rows,
            flat=flat,
            shared=shared,
            marked=len(marks_of(marks, True)),
            interpret=interpret,
        ),
        out_type=[
            varying_like(x, (channels * groups, 2 * CHUNK, CHUNK), jnp.float32),
            varying_like(x, (batch * channels, 2, MODES), jnp.float32),
        ][: 2 if shared is None else 1],
        grid=(channels, groups),
        grid_names=("channel", "rows"),
        scratch_types=[
            loaded,
            tile_ref(4 * MODES, CHUNK, dtype=x.dtype),
            plgpu.SMEM(weights[-1].shape[1:], jnp.float32),
            plgpu.SMEM((2, ROWS + (EDGE if shared is None else shared.edge), PITCH), jnp.float32),
            plgpu.Barrier(num_arrivals=len(streams) * rows_in_tile(shared), num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=len(weights)),
        ],
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="modal_conv_vjp" + form(flat, marks, shared),
    )(*streams.values(), *weights, *marks_of(marks, True))


def _weights(log_poles: Array, dtype: Any) -> list[Array]:
    """Return K and K' in two halves each, and a^k with k a^k for k = 63 ... 0 chunks."""
    steps, chunks = 1 + jnp.arange(CHUNK), jnp.arange(ROWS)[::-1]
    written = powers(log_poles, steps)
    weights = jnp.concatenate(
        [
            *halves_of_weights(written),
            *halves_of_weights(steps[None, None].astype(jnp.float32) / CHUNK * written),
        ],
        1,
    ).astype(dtype)
    decays = jnp.swapaxes(powers(log_poles, CHUNK * chunks), 1, 2)
    return [weights, jnp.stack([decays, chunks[None, :, None].astype(jnp.float32) * decays], 1)]


def _program(
    *refs: Any,
    places: tuple[int, ...],
    channels: int,
    rows: int,
    flat: FlatRows | None,
    shared: TileRows | None,
    marked: int,
    interpret: bool,
) -> None:
    """Run one channel of `rows` rows, or groups that share a tile.

    Each goes from its last tile to its first, row after row.
    """
    streams, rest = dict(zip(places, refs, strict=False)), refs[len(places) : -6]
    weights, rest = (rest[:2], rest[2:]) if shared is None else (rest[:1], rest[1:])
    marks, (out, *before) = rest[:marked], rest[marked:]
    stages, matrices, decay, sums, arrived, ready = refs[-6:]
    loaded, kept = (stages, stages) if flat is None else stages
    tiles = -(-streams[X].shape[1] // ROWS) if flat is None else flat.tiles
    channel, group = lax.axis_index("channel"), lax.axis_index("rows")

    def line_of(step: Array) -> Array:
        return (group * rows + step // tiles) * (rows_in_tile(shared) * channels) + channel

    def load(step: Array) -> None:
        line, tile = line_of(step), tiles - 1 - step % tiles
        for place, stream in streams.items():
            parts = [loaded.at[step % STAGES, place]]
            if shared is not None:
                parts, boxes = shared.parts(parts[0]), shared.boxes(stream, line, channels)
            elif flat is None:
                boxes = [stream.at[line, pl.ds(tile * ROWS, ROWS)]]
            else:
                boxes = [stream.at[pl.ds(flat.chunks(line)[0] + tile * ROWS, ROWS)]]
            for box, part in zip(boxes, parts, strict=True):
                plgpu.copy_gmem_to_smem(box, part, arrived.at[step % STAGES])

    def advance(step: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        stage, spare = loaded.at[step % STAGES], kept.at[step % STAGES]
        cuts = shared
        if marked:  # Their way from device memory overlaps with that of the streams.
            place = (group * rows + step // tiles, tiles - 1 - step % tiles)
            cuts = TileDocuments.load(marks, *place, reverse=True).read_ahead()
        plgpu.barrier_wait(arrived.at[step % STAGES])
        mask = None
        if flat is not None:
            tile = tiles - 1 - step % tiles
            mask = partial(keep_own_steps, flat, line_of(step), tile)

        def start() -> None:
            for i in range(2):
                start_sums(sums.at[i])

        if shared is None:
            pl.when(step % tiles == 0)(start)
        totals = _tile(stage, spare, places, matrices, decay, sums, totals, cuts, interpret, mask)

        for first in before:

            @pl.when(step % tiles == tiles - 1)
            def _(first: Any = first) -> None:
                for i in range(2):
                    first[line_of(step), i] = by_mode(sums.at[i, 0, :MODES])

        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))
        return totals

    for given, ref in zip(weights, (matrices, decay)[-len(weights) :], strict=True):
        plgpu.copy_gmem_to_smem(given.at[channel], ref, ready)
    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    if shared is not None:
        matrices[...] = writing_with_lags(decay, loaded.dtype)
        plgpu.commit_smem()
        decay = decays_of(decay, shared.distances(FAN))
    totals = lax.fori_loop(0, rows * tiles, advance, (zeros(), zeros()))
    for i, total in enumerate(totals):
        out[channel * lax.axis_size("rows") + group, i * CHUNK : (i + 1) * CHUNK] = total


def _tile(
    stage: Any,
    spare: Any,
    places: tuple[int, ...],
    matrices: Any,
    decay: Any,
    sums: Any,
    totals: tuple[Array, ...],
    cuts: TileDocuments | TileRows | None,
    interpret: bool,
    mask: Callable[[Array, Array], tuple[Array, ...]] | None = None,
) -> tuple[Array, ...]:
    """Return the totals with one tile more.

    G, U, and [Q, P] replace dy, x and post_gate in shared memory, as `spare`.
    """
    g, u = read(stage.at[DY]), read(stage.at[X])
    g = g * read(stage.at[POST]) if POST in places else g
    u = u * read(stage.at[PRE]) if PRE in places else u
    g, u = (g, u) if mask is None else mask(g, u)
    seen = g
    documents = cuts if isinstance(cuts, TileDocuments) else None
    if documents is not None:
        g, u = documents.tokens(g), documents.tokens(u)
        seen = documents.leaving(g)
    parts = [matrices.at[i * MODES : (i + 1) * MODES] for i in range(4)]
    written = [products([(seen, high), (seen, low)], interpret) for high, low in (parts[:2], parts[2:])]
    later = [half for z in _later(written, sums, decay, cuts) for half in halves(z, u.dtype)]
    kept = [spare.at[DY], spare.at[POST], spare.at[X]]
    if documents is not None:
        return _add_documents(totals, kept, g, u, jnp.concatenate(later, 1), documents, interpret)
    for ref, z in zip(kept, [g, jnp.concatenate(later, 1), u], strict=True):
        ref[...] = z
    plgpu.commit_smem()
    totals = add_products(totals, kept[:2], kept[2], interpret)
    plgpu.commit_smem()  # All warps are done with this stage before the next load overwrites it.
    return totals


def _add_documents(
    totals: tuple[Array, ...],
    kept: Sequence[Any],
    g: Array,
    u: Array,
    later: Array,
    documents: TileDocuments,
    interpret: bool,
) -> tuple[Array, ...]:
    """Return the totals with one tile of packed rows more.

    G^T U of what lies behind each document of a chunk is added one by one. What lies above the diagonal of G^T U, U
    later than G, does not count.
    """
    cotangent, weights, inputs = kept
    cotangent[...], weights[...] = g, later
    inputs[...] = documents.entering(u)
    plgpu.commit_smem()
    within, sent = add_products(totals, [cotangent, weights], inputs, interpret)

    def add(behind: Callable[[Array], Array], own: Callable[[Array], Array], total: Array) -> Array:
        cotangent[...] = behind(g)
        inputs[...] = own(u)
        plgpu.commit_smem()
        return add_products((total,), [cotangent], inputs, interpret)[0]

    within = documents.behind_the_first(add, within)
    plgpu.commit_smem()  # All warps are done with this stage before the next load overwrites it.
    return within, sent


def _later(
    written: list[Array], sums: Any, decay: Any, cuts: TileDocuments | TileRows | None = None
) -> list[Array]:
    """Return Q and P after each chunk.

    The first rows of `sums` are those after the tile, and on return those before it. Nothing passes between documents
    (`cuts`), nor between rows that share a tile, which are carried to no other.
    """

    def after(i: int, chunks: int) -> Array:
        ref = sums.at[i, chunks : chunks + ROWS, :MODES]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

    def store(pair: list[Array]) -> None:
        for i, z in enumerate(pair):
            sums[i, :ROWS, :MODES] = z

    def aged(pair: list[Array], age: Array, lag: Array) -> list[Array]:
        return [age * pair[0], age * pair[1] + lag * pair[0]]

    def power(chunks: int) -> tuple[Array, Array]:
        if isinstance(cuts, TileRows):
            age = for_all_chunks(decay[chunks])
            return age, chunks * age
        return row(decay.at[0, ROWS - 1 - chunks]), row(decay.at[1, ROWS - 1 - chunks])

    def linked(pair: list[Array], chunks: int) -> list[Array]:
        return pair if cuts is None else [cuts.linked(z, chunks) for z in pair]

    def join(pair: list[Array], distance: int, shift: int) -> list[Array]:
        for k in neighbours(distance, cuts):
            older = [after(i, k * distance + shift) for i in range(2)]
            older = aged(linked(older, k * distance), *power(k * distance))
            pair = [a + b for a, b in zip(pair, older, strict=True)]
        return pair

    carried = []
    if not isinstance(cuts, TileRows):
        ages = [plgpu.load(decay.at[i], layout=plgpu.Layout.WGMMA, optimized=False) for i in range(2)]
        carried = aged([row(sums.at[i, 0, :MODES]) for i in range(2)], *ages)
        carried = carried if cuts is None else [cuts.linked_to_tile(z) for z in carried]
    store(written)
    joined = join(linked([after(i, 1) for i in range(2)], 0), 1, 1)
    for distance in (FAN, FAN * FAN):
        if neighbours(distance, cuts):
            store(joined)
            joined = join(joined, distance, 0)
    if isinstance(cuts, TileRows):
        return joined
    found = [a + b for a, b in zip(joined, carried, strict=True)]
    handed = aged(found, *power(1))
    if cuts is not None:
        handed = [cuts.through(z) for z in handed]
    store([a + b for a, b in zip(handed, written, strict=True)])
    return found
