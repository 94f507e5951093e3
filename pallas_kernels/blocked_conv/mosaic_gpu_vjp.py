"""Hopper: all gradients in one pass over memory, from the end of a row to its beginning.

With G = post_gate * dy and U = pre_gate * x, tiles [chunk, step], G_l the tile l chunks later and U_l l chunks earlier,

    dU = G_0 M_0^T + G_1 M_1^T + G_2 M_2^T,    dx = pre_gate * dU,    dpre_gate = x * dU,
    dpost_gate = dy * (U_0 M_0 + U_1 M_1 + U_2 M_2),
    dM_l^T = sum over tiles of G_l^T U,        dh[k] = the sum of dM_l[j, i] over 64 l + i - j = k.

dM_l stays in registers, in fp32, until the program ends; XLA sums programs and diagonals, always in the same order.
The chunks after a tile are kept from the tile walked through before; the two before it are loaded with it. For dM, G_l
and U lie in shared memory once more: where post_gate was loaded to, and where U and G were shifted before and dx and
dpre_gate will be. Two programs fit on a multiprocessor only by that.

In packed rows G_1 and G_2 hold of each chunk what its first document has, as far back as this one reaches, and act on
the last document of a chunk of U. Only G_0 has something to send to each other document of a chunk: dU and dM_0 take
one product more for each, see `TileDocuments`. The forward kernel makes dpost_gate there, with dy in post_gate's place:
registers hold no more.

Rows that share chunks (`_conv.flat_rows`) end within a chunk that XLA differentiates. Its G is put behind the row's
last chunk, as if walked through before. Shared memory has one more name for each way that copies read it.
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
from pallas_kernels._conv.flat_rows import FlatRows, flatten, unflatten
from pallas_kernels._conv.flat_tiles import Edges, keep_own_steps, read_steps, store_row
from pallas_kernels._conv.tile_documents import TileDocuments, marks_of
from pallas_kernels._conv.tiles import STAGES, add_products, chunks_ref, read, zeros
from pallas_kernels._hopper import as_chunks, as_rows, rows_per_program, varying_like
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel, tile_ref
from pallas_kernels.blocked_conv.edges import differentiate_last_chunks
from pallas_kernels.blocked_conv.hopper import CHUNK, LAGS, REACH, ROWS, is_read_flat
from pallas_kernels.blocked_conv.tiles import (
    DY,
    PITCH,
    POST,
    PRE,
    X,
    block_of,
    convolve_tile,
    linked,
    matrices,
    read_shifted,
    sum_of_products,
)

OUTPUTS = (X, PRE, POST)
"""Whose gradients are written, in this order, where there is such a stream."""


def gradients(
    x: Float[Array, "B D T"],
    h: Float[Array, "D F"],
    pre_gate: Float[Array, "B D T"] | None,
    post_gate: Float[Array, "B D T"] | None,
    dy: Float[Array, "B D T"],
    *,
    marks: Marks | None = None,
    interpret: bool,
) -> tuple[
    Float[Array, "B D T"], Float[Array, "D F"], Float[Array, "B D T"] | None, Float[Array, "B D T"] | None
]:
    """Return gradients of x, h (in fp32), pre_gate and post_gate.

    y = post_gate * conv(pre_gate * x, h). That of post_gate in packed rows, which have `marks`, is left to the caller:
    None.
    """
    streams = {DY: dy, POST: post_gate, X: x, PRE: pre_gate}
    given = {place: z for place, z in streams.items() if z is not None}
    written = tuple(
        place for place in OUTPUTS if place in given and not (place == POST and marks is not None)
    )
    flat = FlatRows(x.shape[2], reverse=True) if is_read_flat(x.shape[2], packed=marks is not None) else None
    chunked = {place: as_chunks(z) if flat is None else flatten(z) for place, z in given.items()}
    taps = matrices(h.astype(x.dtype))
    edges, of_edges = [], None
    if flat is not None and flat.ragged:
        edges, of_edges = differentiate_last_chunks(flat, chunked, written, taps, x.shape)
    dmatrices, *found = _kernel(
        chunked, taps, written, marks_of(marks, True), flat, edges, x.shape[0], interpret
    )
    if flat is not None and x.size % CHUNK:  # The last row's edge lies in no other row's chunk.
        found = [z.at[-1].set(edge[-1]) for z, edge in zip(found, edges, strict=False)]
    _, vjp = jax.vjp(matrices, h)
    total = dmatrices.reshape(h.shape[0], -1, *dmatrices.shape[1:]).sum(1)
    if of_edges is not None:
        total = total.at[..., block_of(0)].add(of_edges)
    (dh,) = vjp(total)
    rows = {
        place: as_rows(z, x.shape) if flat is None else unflatten(z, x.shape)
        for place, z in zip(written, found, strict=True)
    }
    return rows[X], dh, rows.get(PRE), rows.get(POST)


def _kernel(
    streams: dict[int, Array],
    taps: Array,
    written: tuple[int, ...],
    marked: Sequence[Array],
    flat: FlatRows | None,
    edges: Sequence[Array],
    batch: int,
    interpret: bool,
) -> list[Array]:
    """Return [the gradient of `taps` in each program, those of the streams at `written`].

    `edges` are those of `differentiate_last_chunks`.
    """
    x, channels = streams[X], taps.shape[0]
    rows = rows_per_program(batch, channels)
    partial_sums = varying_like(x, (channels * batch // rows, CHUNK, (REACH + 1) * CHUNK), jnp.float32)
    arrivals = len(streams) + len(_looking_back(tuple(streams), written)) + (len(written) if edges else 0)
    return mosaic_kernel(
        partial(
            _program,
            places=tuple(streams),
            written=written,
            channels=channels,
            rows=rows,
            marked=len(marked),
            flat=flat,
            interpret=interpret,
        ),
        out_type=[partial_sums, *(jax.typeof(x) for _ in written)],
        grid=(channels, batch // rows),
        grid_names=("channel", "rows"),
        scratch_types=[
            *_tiles(x.dtype, flat),
            tile_ref(*taps.shape[1:], dtype=x.dtype),
            plgpu.SMEM((STAGES, 2, REACH, CHUNK), x.dtype),
            plgpu.SMEM((REACH, CHUNK), x.dtype),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=STAGES),
            plgpu.Barrier(),
            *([plgpu.SMEM((STAGES, len(written), CHUNK), x.dtype)] if edges else []),
        ],
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="blocked_conv_vjp" + ("_packed" if marked else "" if flat is None else "_flat"),
    )(*streams.values(), taps, *marked, *edges)


def _tiles(dtype: Any, flat: FlatRows | None) -> list[Any]:
    """Return memory of the stages, and of two tiles more or of one that is shifted.

    Of flat rows each has three names: as tensor cores read tiles, as copies begin at any chunk, and plain.
    """
    stages, spare, shifted = (
        (STAGES, 4, ROWS, CHUNK),
        (2, ROWS, CHUNK),
        plgpu.SMEM((ROWS + REACH, PITCH), dtype),
    )
    if flat is None:
        return [tile_ref(*stages, dtype=dtype), plgpu.RefUnion(tile_ref(*spare, dtype=dtype), shifted)]

    def names(shape: tuple[int, ...]) -> list[Any]:
        return [tile_ref(*shape, dtype=dtype), chunks_ref(*shape, dtype=dtype), plgpu.SMEM(shape, dtype)]

    return [plgpu.RefUnion(*names(stages)), plgpu.RefUnion(*names(spare), shifted)]


def _looking_back(places: tuple[int, ...], written: tuple[int, ...]) -> tuple[int, ...]:
    """Return streams whose last chunks before a tile are loaded with it.

    They are those of U, where it is convolved.
    """
    return tuple(place for place in (X, PRE) if place in places) if POST in written else ()


def _program(
    *refs: Any,
    places: tuple[int, ...],
    written: tuple[int, ...],
    channels: int,
    rows: int,
    marked: int,
    flat: FlatRows | None,
    interpret: bool,
) -> None:
    """Run one channel of `rows` rows, each from its last tile to its first, row after row."""
    refs, arriving = (refs[:-1], refs[-1]) if flat is not None and flat.ragged else (refs, None)
    streams, (taps, *rest) = dict(zip(places, refs, strict=False)), refs[len(places) : -7]
    marks, rest = rest[:marked], rest[marked:]
    edges = last = None
    if flat is not None and flat.ragged:
        given, (last, *rest) = rest[: len(written)], rest[len(written) :]
        edges = Edges(flat, given, arriving)
    dtaps, *outputs = rest
    stages, spares, toeplitz, before, after, arrived, ready = refs[-7:]
    rooms, loaded, plain_stages = (stages, stages, stages) if flat is None else stages
    spare, *copied, shifted = spares
    tiles = -(-streams[X].shape[1] // ROWS) if flat is None else flat.tiles
    channel, group = lax.axis_index("channel"), lax.axis_index("rows")

    def line_of(step: Array) -> Array:
        return (group * rows + step // tiles) * channels + channel

    def tile_of(step: Array) -> Array:
        return tiles - 1 - step % tiles

    def box(ref: Any, step: Array, start: Array, size: int) -> Any:
        return ref.at[line_of(step), pl.ds(start, size)] if flat is None else ref.at[pl.ds(start, size)]

    def load(step: Array) -> None:
        slot, start = step % STAGES, tile_of(step) * ROWS
        if flat is not None:
            start = flat.chunks(line_of(step))[0] + start
        for place, stream in streams.items():
            plgpu.copy_gmem_to_smem(box(stream, step, start, ROWS), loaded.at[slot, place], arrived.at[slot])
        for i, place in enumerate(_looking_back(places, written)):
            edge = box(streams[place], step, jnp.maximum(start - REACH, 0), REACH)
            plgpu.copy_gmem_to_smem(edge, before.at[slot, i], arrived.at[slot])
        if edges is not None:
            edges.load(line_of(step), slot, arrived.at[slot])

    def store(step: Array, dpost: Any, put: Callable[[Any], None]) -> None:
        """Store gradients at `written`; `put` leaves all in tiles except the one at `dpost`."""
        if flat is not None:
            whole, plain = copied
            kept = (whole, dpost), (plain, plain_stages.at[step % STAGES, DY])
            _store_flat(flat, line_of(step), tile_of(step), written, outputs, put, *kept)
            return
        put(spare)
        for source, output in zip(_sources(written, spare, dpost), outputs, strict=True):
            plgpu.copy_smem_to_gmem(source, box(output, step, tile_of(step) * ROWS, ROWS))

    def enter(step: Array) -> None:
        """Return G of the chunk that a row ends in, behind the chunks that the kernel takes of it."""
        assert flat is not None
        assert last is not None
        shifted[flat.entry(line_of(step), tile_of(step)), :CHUNK] = read_steps(last.at[line_of(step)])

    def advance(step: Array, dmatrices: tuple[Array, ...]) -> tuple[Array, ...]:
        slot = step % STAGES
        stage, documents = loaded.at[slot], None
        if marks:
            place = (group * rows + step // tiles, tile_of(step))
            documents = TileDocuments.load(marks, *place, reverse=True)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(step + 1 < rows * tiles)(lambda: load(step + 1))
        plgpu.barrier_wait(arrived.at[slot])
        u, g = _product(stage, X, PRE, places), _product(stage, DY, POST, places)
        if documents is not None:
            u, g = documents.tokens(u), documents.tokens(g)
        if flat is not None:
            u, g = keep_own_steps(flat, line_of(step), tile_of(step), u, g)

        def join(place: int, z: Array) -> Array:
            """Return the gradient of a stream with the neighbour's steps where they lie in the tile."""
            if edges is None:
                return z
            return edges.join(written.index(place), z, line_of(step), tile_of(step), slot)

        if POST in written:
            edge = _edge(before.at[slot], places, tile_of(step) == 0)
            y = _convolve(u, edge, shifted, toeplitz, interpret)
            stage[DY] = join(POST, read(stage.at[DY]).astype(y.dtype) * y).astype(loaded.dtype)
        later = _shifted_cotangents(
            g, shifted, after, step % tiles == 0, documents, None if last is None else partial(enter, step)
        )
        if documents is not None:  # Registers would not hold it all the while.
            stage[DY] = g
        dmatrices = _add_outer(dmatrices, u, later, spare, rooms.at[slot].at[POST], documents, interpret)
        if documents is not None:
            later[0] = read(stage.at[DY])
        transposed = [toeplitz.at[:, block_of(lag)] for lag in LAGS]
        du = convolve_tile(later, transposed, documents, interpret, kept=stage.at[DY])
        put = partial(_store_input_gradients, du, stage, places=places, documents=documents, join=join)
        store(step, stage.at[DY], put)
        return dmatrices

    plgpu.copy_gmem_to_smem(taps.at[channel], toeplitz, ready)
    load(jnp.int32(0))
    plgpu.barrier_wait(ready)
    dmatrices = lax.fori_loop(0, rows * tiles, advance, tuple(zeros() for _ in LAGS))
    for lag, total in zip(LAGS, dmatrices, strict=True):
        dtaps[channel * lax.axis_size("rows") + group, :, block_of(lag)] = total
    plgpu.wait_smem_to_gmem(0)


def _sources(written: tuple[int, ...], tiles: Any, dpost: Any) -> list[Any]:
    """Return where the gradients at `written` lie in shared memory."""
    found = {X: tiles.at[0], PRE: tiles.at[1], POST: dpost}
    return [found[place] for place in written]


def _store_flat(
    flat: FlatRows,
    line: Array,
    tile: Array,
    written: tuple[int, ...],
    outputs: Sequence[Any],
    put: Callable[[Any], None],
    whole: tuple[Any, Any],
    plain: tuple[Any, Any],
) -> None:
    """Store the row's chunks of a tile, from `whole` or `plain`.

    Both are tiles for `put`, and dpost_gate is in `whole`.
    """

    def put_plain() -> None:
        if POST in written:
            plain[1][...] = read(whole[1])
        put(plain[0])

    store_row(
        flat,
        line,
        tile,
        outputs,
        whole=(_sources(written, *whole), lambda: put(whole[0])),
        plain=(_sources(written, *plain), put_plain),
    )


def _product(stage: Any, stream: int, gate: int, places: tuple[int, ...]) -> Array:
    z = read(stage.at[stream])
    return z * read(stage.at[gate]) if gate in places else z


def _edge(before: Any, places: tuple[int, ...], none: Array) -> Array:
    """Return the last chunks of U before a tile, zeros if there are `none`."""
    edge = before[0]
    if PRE in places:
        edge = edge * before[1]
    return jnp.where(none, jnp.zeros_like(edge), edge)


def _convolve(u: Array, edge: Array, shifted: Any, toeplitz: Any, interpret: bool) -> Array:
    """Return conv(u) of a tile, with the chunks of `_edge` before it."""
    shifted[:REACH, :CHUNK] = edge
    shifted[REACH:, :CHUNK] = u
    earlier = [u, *(read_shifted(shifted, REACH - lag) for lag in LAGS[1:])]
    return sum_of_products(earlier, [toeplitz.at[:, block_of(lag)].T for lag in LAGS], interpret)


def _shifted_cotangents(
    g: Array,
    shifted: Any,
    after: Any,
    none: Array,
    documents: TileDocuments | None,
    enter: Callable[[], None] | None,
) -> list[Array]:
    """Return G_0, G_1, G_2 of a tile.

    `after` is the chunks of G after it. Without any (`none`) they are its own first. `enter` is called where there are
    none, to put into `shifted` what lies behind the row's last chunk.
    """
    edge = after[...]
    shifted[:ROWS, :CHUNK] = g if documents is None else documents.leaving(g)
    shifted[ROWS:, :CHUNK] = jnp.where(none, jnp.zeros_like(edge), edge)
    if enter is not None:  # Make its place there: made before, it would be kept in registers and spilled.
        pl.when(none)(enter)
    after[...] = shifted[:REACH, :CHUNK]
    later = [g, *(read_shifted(shifted, lag) for lag in LAGS[1:])]
    return linked(later, documents)


def _add_outer(
    totals: tuple[Array, ...],
    u: Array,
    later: list[Array],
    spare: Any,
    room: Any,
    documents: TileDocuments | None,
    interpret: bool,
) -> tuple[Array, ...]:
    """Return total_l + G_l^T U, by way of `spare` and `room`: two at once, then the third.

    In packed rows of the last document of each chunk, then G_0^T U of the others, one by one. What lies above the
    diagonal of G_0^T U, U later than G, does not count.
    """
    spare[0], spare[1], room[...] = u if documents is None else documents.first(u), later[0], later[1]
    plgpu.commit_smem()
    here, before = add_products(totals[:2], [spare.at[1], room], spare.at[0], interpret)
    room[...] = later[2]
    plgpu.commit_smem()
    (long_before,) = add_products(totals[2:], [room], spare.at[0], interpret)
    if documents is None:
        return here, before, long_before
    room[...] = u  # In registers u and G_0 would be spilled.

    def add(behind: Callable[[Array], Array], own: Callable[[Array], Array], total: Array) -> Array:
        spare[0], spare[1] = own(read(room)), behind(read(spare.at[1]))
        plgpu.commit_smem()
        return add_products((total,), [spare.at[1]], spare.at[0], interpret)[0]

    return documents.behind_the_first(add, here), before, long_before


def _store_input_gradients(
    du: Array,
    stage: Any,
    kept: Any,
    *,
    places: tuple[int, ...],
    documents: TileDocuments | None,
    join: Callable[[int, Array], Array],
) -> None:
    """Put dx, and dpre_gate if it is wanted, into `kept`."""
    for i, factor in enumerate((PRE, X) if PRE in places else (None,)):
        z = du if factor is None else du * read(stage.at[factor]).astype(du.dtype)
        z = join((X, PRE)[i], z if documents is None else documents.tokens(z))
        kept[i] = z.astype(kept.dtype)
    plgpu.commit_smem()
