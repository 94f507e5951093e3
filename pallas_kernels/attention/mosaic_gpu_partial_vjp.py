"""Hopper: gradients of partial attention in fp32, by a kernel over tiles of queries and one over tiles of keys.

With the output and the log-sum-exp over all keys that a query sees, those of other calls too, and delta = do o,

    p = exp(s - lse),   ds = p (do v^T - delta),   dq = scale ds k,   dk = scale ds^T q,   dv = p^T do.

A program has 128 queries, or keys, of one head; the heads that share keys follow each other in one program. Nothing is
added atomically, so that gradients repeat bit for bit; the scores are made twice for it.

Source: Dao, FlashAttention-2, 2307.08691, algorithm 2.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._mosaic_gpu import mosaic_kernel
from pallas_kernels.attention.hopper import ROWS, TILE
from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.tiles import (
    LOG2E,
    Call,
    Stages,
    across,
    add_products,
    along,
    by_row,
    call_of,
    feed,
    indices,
    matrix,
    per_query,
    stages,
    swizzled,
    visible,
    zeros,
)


def gradients_given_lse(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
    mask: Mask,
    *,
    scale: float | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """What these keys add to dq, and dk and dv, fp32; do is rounded to q's dtype.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    call = call_of(q, k, mask, scale, interpret)
    delta = jnp.einsum("bthk,bthk->bht", do.astype(jnp.float32), o.astype(jnp.float32), precision="highest")
    # exp(s - lse) is 0 for a query that sees no key anywhere.
    lse = jnp.where(lse > EMPTY_LSE / 2, lse * LOG2E, -EMPTY_LSE)
    arrays = [matrix(x) for x in (q, do.astype(q.dtype), k, v)]
    streams = vary_alike(*arrays, per_query(lse), per_query(delta))
    options = {
        "num_threads": 3,
        "thread_name": "warpgroup",
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        "interpret": interpret,
    }

    def result(x: Array, tiles: int) -> Any:
        return varying_like(streams[0], (x.shape[0], tiles * TILE, x.shape[2] * x.shape[3]), jnp.float32)

    dq = mosaic_kernel(
        partial(_queries_program, call=call),
        out_type=result(q, call.tiles),
        grid=(call.tiles, q.shape[0], q.shape[2]),
        grid_names=("tile", "row", "head"),
        scratch_types=_scratch(q.dtype, call.width, TILE, ()),
        kernel_name="partial_attention_dq",
        **options,
    )(*streams)
    tiles = -(-k.shape[1] // TILE)
    dk, dv = mosaic_kernel(
        partial(_keys_program, call=call),
        out_type=[result(k, tiles)] * 2,
        grid=(tiles, k.shape[0], k.shape[2]),
        grid_names=("tile", "row", "head"),
        scratch_types=_scratch(q.dtype, call.width, ROWS, (jnp.float32,) * 2),
        kernel_name="partial_attention_dkv",
        **options,
    )(*streams)
    return tuple(dx[:, : x.shape[1]].reshape(x.shape) for dx, x in ((dq, q), (dk, k), (dv, v)))


class Shared(NamedTuple):
    """Shared memory of a program: two tiles of each warpgroup's own, and those that it walks over."""

    own: tuple[Any, Any]
    ready: Any
    walked: Stages


def _scratch(dtype: Any, width: int, rows: int, vectors: tuple[Any, ...]) -> Any:
    """Scratch where `rows` rows are a step, with numbers for each row of these types."""
    own = tuple(swizzled((2, ROWS, width), dtype) for _ in range(2))
    count = 256 * TILE // (width * rows)
    tiles = [swizzled((count, rows, width), dtype) for _ in range(2)]
    walked = stages(count, *tiles, *(plgpu.SMEM((count, rows), x) for x in vectors))
    return [Shared(own, plgpu.Barrier(num_arrivals=2, num_barriers=2), walked)]


def _queries_program(*refs: Any, call: Call) -> None:
    """dq of 128 queries of one head; those that see most keys come first."""
    q, do, k, v, lse, delta, dq, shared = refs
    row, head, worker = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("warpgroup")
    tile = call.tiles - 1 - lax.axis_index("tile")
    limit = jnp.int32(call.keys)
    steps, whole = pl.cdiv(limit, jnp.int32(TILE)), limit // TILE
    if call.causal:
        steps, whole = jnp.minimum(steps, tile + 1), jnp.minimum(whole, tile)

    @pl.when(worker == 2)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        columns = pl.ds(head // call.ratio * call.width, call.width)

        def boxes(step: Array) -> Any:
            box = (row, pl.ds(step * TILE, TILE), columns)
            return ((k.at[box], v.at[box]),)

        feed((shared.walked,), boxes, steps)

    @pl.when(worker < 2)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        first = tile * TILE + worker * ROWS
        box = (row, pl.ds(first, ROWS), pl.ds(head * call.width, call.width))
        queries, cotangents = _fetch((q.at[box], do.at[box]), shared, worker)
        top, less = (across(by_row(x.at[row, head, pl.ds(first, ROWS)]), TILE) for x in (lse, delta))

        def advance(step: Array, acc: Array, masked: bool) -> Array:
            (keys, values), free = _next(shared.walked, step)
            p, dp = _p_and_dp((queries, keys.T), (cotangents, values.T), top, call)
            ds = p * (dp - less)
            if masked:
                ds = jnp.where(visible(first, step * TILE, limit, call.causal), ds, 0.0)
            (acc,) = add_products([acc], [(ds.astype(q.dtype), keys)], call.simulated)
            plgpu.barrier_arrive(free)
            return acc

        acc = lax.fori_loop(0, whole, partial(advance, masked=False), zeros(call.width))
        acc = lax.fori_loop(whole, steps, partial(advance, masked=True), acc)
        dq[box] = acc * call.scale


def _keys_program(*refs: Any, call: Call) -> None:
    """dk and dv of 128 keys; the rows of its products are keys, the columns 64 queries of a head of the group."""
    q, do, k, v, lse, delta, dk, dv, shared = refs
    row, group, worker = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("warpgroup")
    tile = lax.axis_index("tile")
    limit = jnp.int32(call.keys)
    start = tile * (TILE // ROWS) if call.causal else jnp.int32(0)
    count = jnp.where(tile * TILE < limit, call.tiles * (TILE // ROWS) - start, 0)

    @pl.when(worker == 2)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")

        def boxes(step: Array) -> Any:
            head, own = group * call.ratio + step // count, pl.ds((start + step % count) * ROWS, ROWS)
            box, at = (row, own, pl.ds(head * call.width, call.width)), (row, head, own)
            return ((q.at[box], do.at[box], lse.at[at], delta.at[at]),)

        feed((shared.walked,), boxes, count * call.ratio)

    @pl.when(worker < 2)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        first = tile * TILE + worker * ROWS
        box = (row, pl.ds(first, ROWS), pl.ds(group * call.width, call.width))
        keys, values = _fetch((k.at[box], v.at[box]), shared, worker)

        def advance(step: Array, totals: Any, masked: bool, before: Array) -> Any:
            (queries, cotangents, top, less), free = _next(shared.walked, before + step)
            p, dp = _p_and_dp((keys, queries.T), (values, cotangents.T), along(top), call)
            if masked:
                ahead = (start + step) * ROWS - first
                p = jnp.where(indices(ROWS, 1) + ahead >= indices(ROWS, 0), p, 0.0)
            ds = p * (dp - along(less))
            pairs = [(x.astype(q.dtype), y) for x, y in ((ds, queries), (p, cotangents))]
            totals = tuple(add_products(totals, pairs, call.simulated))
            plgpu.commit_smem()  # Threads have read `top` and `less`, where the copy engine writes next.
            plgpu.barrier_arrive(free)
            return totals

        def add_head(head: Array, totals: Any) -> Any:
            if call.causal:
                totals = lax.fori_loop(0, near, partial(advance, masked=True, before=head * count), totals)
            return lax.fori_loop(near, count, partial(advance, masked=False, before=head * count), totals)

        near = jnp.minimum(TILE // ROWS, count) if call.causal else 0
        totals = lax.fori_loop(0, call.ratio, add_head, (zeros(call.width), zeros(call.width)))
        seen = indices(call.width, 0) < limit - first
        for out, x, factor in zip((dk, dv), totals, (call.scale, 1.0), strict=True):
            out[box] = jnp.where(seen, x * factor, 0.0)


def _fetch(sources: tuple[Any, Any], shared: Shared, worker: Array) -> tuple[Any, Any]:
    """A warpgroup's own two tiles, before it goes on."""
    own, ready = (shared.own[0].at[worker], shared.own[1].at[worker]), shared.ready.at[worker]
    for source, tile in zip(sources, own, strict=True):
        plgpu.copy_gmem_to_smem(source, tile, ready)
    plgpu.barrier_wait(ready)
    return own


def _next(walked: Stages, step: Array) -> tuple[tuple[Any, ...], Any]:
    """The tiles of a step when they are there, and the barrier that frees their places."""
    slot = step % walked.tiles[0].shape[0]
    plgpu.barrier_wait(walked.there.at[slot])
    return tuple(tiles.at[slot] for tiles in walked.tiles), walked.free.at[slot]


def _p_and_dp(
    scored: tuple[Any, Any], weighed: tuple[Any, Any], top: Array, call: Call
) -> tuple[Array, Array]:
    """p and do v, or either's transpose."""

    def multiply(scores: Any, total: Any) -> tuple[Array, Array]:
        plgpu.wgmma(scores, *scored)
        plgpu.wgmma(total, *weighed)
        found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
        return jnp.exp2(found * (call.scale * LOG2E) - top), total[...]

    shape = (scored[0].shape[0], scored[1].shape[1])
    return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * 2)
