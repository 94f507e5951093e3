"""Hopper: one pass over memory, the filter as a Toeplitz matrix in shared memory, products on tensor cores.

A program takes one channel of a few rows and walks along time in tiles of 64 chunks of 64 steps. Chunks are the rows
of a matrix product: with U the tile [chunk, step],

    Y = U_0 M_0 + U_1 M_1 + U_2 M_2,      U_l = the tile l chunks earlier,      M_l[j, i] = h[64 l + i - j],

so that up to 129 taps need no other chunk. U_0 = pre_gate * x stays in registers. It is also left in shared memory,
below the last two chunks of the tile before. From there U_1 and U_2 are read one and two rows higher.

In packed rows U_1 and U_2 hold of each chunk what its last document has, as far as this one lasts, and M_0 takes the
documents of a chunk one by one.

Lane semantics, as that buffer must not be tiled: no swizzle survives a shift by one row.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.documents import Marks, mark
from pallas_kernels._conv.flat_rows import FlatRows, flatten, unflatten
from pallas_kernels._conv.flat_tiles import Edges, keep_own_steps, read_steps, store_row
from pallas_kernels._conv.gates import accumulator, add_skip
from pallas_kernels._conv.tile_documents import TileDocuments, marks_of
from pallas_kernels._conv.tiles import STAGES, chunks_ref, read
from pallas_kernels._hopper import as_chunks, as_rows, rows_per_program
from pallas_kernels._mosaic_gpu import LANE, mosaic_kernel, tile_ref
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.blocked_conv.edges import convolve_first_chunks
from pallas_kernels.blocked_conv.hopper import CHUNK, LAGS, REACH, ROWS, is_read_flat
from pallas_kernels.blocked_conv.mosaic_gpu_vjp import gradients
from pallas_kernels.blocked_conv.tiles import (
    PITCH,
    POST,
    PRE,
    X,
    block_of,
    convolve_tile,
    linked,
    matrices,
    read_shifted,
)


def blocked_conv_mosaic_gpu(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
    interpret: bool = False,
) -> Float[Array, "B D T"]:
    """Compute `blocked_conv`; what `hopper.why_not` refuses is not checked again.

    Args:
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    h = add_skip(filter.astype(accumulator(x.dtype)), bias, 0)
    x, h, pre_gate, post_gate = vary_alike(x, h, pre_gate, post_gate)
    marks = None if segment_ids is None else mark(segment_ids)
    return _conv(x, h, pre_gate, post_gate, marks, interpret)


@partial(OwnGradient, nondiff_argnums=(5,))
def _conv(
    x: Array,
    h: Array,
    pre_gate: Array | None,
    post_gate: Array | None,
    marks: Marks | None,
    interpret: bool,
) -> Array:
    """Convolve rows, as matrices [chunk, step]; a last tile that is not full reads zeros.

    Where T is no multiple of 512 they share chunks, see `_conv.flat_rows`; packed rows are padded.
    """
    given = {place: z for place, z in ((X, x), (PRE, pre_gate), (POST, post_gate)) if z is not None}
    flat = FlatRows(x.shape[2]) if is_read_flat(x.shape[2], packed=marks is not None) else None
    streams = {place: as_chunks(z) if flat is None else flatten(z) for place, z in given.items()}
    taps = matrices(h.astype(x.dtype))
    edges = convolve_first_chunks(flat, streams, taps, x.shape) if flat is not None and flat.ragged else ()
    y = _kernel(streams, taps, marks_of(marks, False), flat, edges, x.shape[0], interpret)
    return as_rows(y, x.shape) if flat is None else unflatten(y, x.shape)


def _kernel(
    streams: dict[int, Array],
    taps: Array,
    marked: Sequence[Array],
    flat: FlatRows | None,
    edges: Sequence[Array],
    batch: int,
    interpret: bool,
) -> Array:
    """Run `_conv` of streams in chunks; `edges` are those of `convolve_first_chunks`."""
    x, channels = streams[X], taps.shape[0]
    shared = rows_per_program(batch, channels)
    loaded, stored = tile_ref, tile_ref(ROWS, CHUNK, dtype=x.dtype)
    if flat is not None:
        loaded = chunks_ref
        stored = plgpu.RefUnion(chunks_ref(ROWS, CHUNK, dtype=x.dtype), plgpu.SMEM((ROWS, CHUNK), x.dtype))
    return mosaic_kernel(
        partial(
            _program,
            channels=channels,
            rows=shared,
            gated=(PRE in streams, POST in streams),
            flat=flat,
            interpret=interpret,
        ),
        out_type=jax.typeof(x),
        grid=(channels, batch // shared),
        grid_names=("channel", "rows"),
        scratch_types=[
            loaded(STAGES, len(streams), ROWS, CHUNK, dtype=x.dtype),
            stored,
            tile_ref(CHUNK, (REACH + 1) * CHUNK, dtype=x.dtype),
            plgpu.SMEM((REACH + ROWS, PITCH), x.dtype),
            plgpu.Barrier(num_arrivals=len(streams) + (1 if edges else 0), num_barriers=STAGES),
            plgpu.Barrier(),
            *([plgpu.SMEM((STAGES, 1, CHUNK), x.dtype)] if edges else []),
        ],
        compiler_params=LANE,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="blocked_conv" + ("_packed" if marked else "" if flat is None else "_flat"),
    )(*streams.values(), taps, *marked, *edges)


def _program(
    *refs: Any,
    channels: int,
    rows: int,
    gated: tuple[bool, bool],
    flat: FlatRows | None,
    interpret: bool,
) -> None:
    """Run one channel of `rows` rows, tile after tile, row after row."""
    refs, arriving = (refs[:-1], refs[-1]) if flat is not None and flat.ragged else (refs, None)
    *given, y, loaded, stored, toeplitz, history, arrived, ready = refs
    pre_gated, post_gated = gated
    streams, (taps, *marks) = given[: 1 + sum(gated)], given[1 + sum(gated) :]
    edges = entering = None
    if flat is not None and flat.ragged:
        (outputs, entering), marks = marks, []
        edges = Edges(flat, [outputs], arriving)
    dtype = y.dtype
    tiles = -(-y.shape[1] // ROWS) if flat is None else flat.tiles
    channel, first = lax.axis_index("channel"), lax.axis_index("rows") * rows

    def line_of(step: Array) -> Array:
        return (first + step // tiles) * channels + channel

    def box(ref: Any, step: Array) -> Any:
        if flat is None:
            return ref.at[line_of(step), pl.ds(step % tiles * ROWS, ROWS)]
        return ref.at[pl.ds(flat.chunks(line_of(step))[0] + step % tiles * ROWS, ROWS)]

    def load(step: Array) -> None:
        slot = step % STAGES
        for i, stream in enumerate(streams):
            plgpu.copy_gmem_to_smem(box(stream, step), loaded.at[slot, i], arrived.at[slot])
        if edges is not None:
            edges.load(line_of(step), slot, arrived.at[slot])

    def load_next(step: Array) -> None:
        pl.when(step + STAGES < rows * tiles)(lambda: load(step + STAGES))

    def put(kept: Any, step: Array, out: Array) -> None:
        """Put the output into shared memory, with the neighbour's steps where they lie in the tile."""
        if edges is not None:
            out = edges.join(0, out, line_of(step), step % tiles, step % STAGES)
        kept[...] = out.astype(dtype)
        plgpu.commit_smem()
        load_next(step)

    def advance(step: Array, _: None) -> None:
        slot = step % STAGES
        documents = None
        if marks:
            documents = TileDocuments.load(marks, first + step // tiles, step % tiles, reverse=False)
        plgpu.barrier_wait(arrived.at[slot])

        @pl.when(step % tiles == 0)
        def _() -> None:
            history[:REACH, :CHUNK] = jnp.zeros((REACH, CHUNK), dtype)
            if entering is not None:
                history[REACH - 1, :CHUNK] = read_steps(entering.at[line_of(step)])

        u = read(loaded.at[slot, 0])
        if pre_gated:
            u = u * read(loaded.at[slot, 1])
        if flat is not None:
            (u,) = keep_own_steps(flat, line_of(step), step % tiles, u)
        u = u if documents is None else documents.tokens(u)
        history[REACH:, :CHUNK] = u if documents is None else documents.leaving(u)
        earlier = linked([u, *(read_shifted(history, REACH - lag) for lag in LAGS[1:])], documents)
        out = convolve_tile(earlier, [toeplitz.at[:, block_of(lag)].T for lag in LAGS], documents, interpret)
        if post_gated:
            gate = read(loaded.at[slot, len(streams) - 1])
            out = out * gate.astype(out.dtype)
        out = out if documents is None else documents.tokens(out)
        history[:REACH, :CHUNK] = history[ROWS:, :CHUNK]
        if flat is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            whole, plain = (([kept], partial(put, kept, step, out)) for kept in stored)
            store_row(flat, line_of(step), step % tiles, [y], whole=whole, plain=plain)
            return
        if documents is None:
            load_next(step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        stored[...] = out.astype(dtype)
        plgpu.commit_smem()
        if documents is not None:  # Where it was timed it stands above; the simulation takes that for a race.
            load_next(step)
        plgpu.copy_smem_to_gmem(stored, box(y, step))

    plgpu.copy_gmem_to_smem(taps.at[channel], toeplitz, ready)
    lax.fori_loop(0, min(STAGES, rows * tiles), lambda step, _: load(step), None)
    plgpu.barrier_wait(ready)
    lax.fori_loop(0, rows * tiles, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _forward(*args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _conv(*args), args[:-1]


def _backward(interpret: bool, residuals: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x, h, pre_gate, post_gate, marks = residuals
    *others, dpost_gate = gradients(x, h, pre_gate, post_gate, g, marks=marks, interpret=interpret)
    if marks is not None and post_gate is not None:
        dpost_gate = _conv(x, h, pre_gate, g, marks, interpret)
    return *others, dpost_gate, None


_conv.defvjp(_forward, _backward)
