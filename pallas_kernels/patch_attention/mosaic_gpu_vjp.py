"""Hopper: gradients, by a kernel over tiles of queries (dq, what the bias sums) and one over tiles of keys (dk, dv).

With scores s and their log-sum-exp kept from the forward pass, dp = do v^T and delta = sum p dp,

    p = exp(s - lse),    ds = p (dp - delta),    dq = ds k / sqrt(K),    dk = ds^T q / sqrt(K),    dv = p^T do.

delta is do o as well, but o is rounded; so dq's kernel walks over its keys twice, the second time out of the cache.

The queries that see a tile of keys are neighbours as well, so both walk over an interval; nothing is added atomically.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels._hopper import varying_like
from pallas_kernels.patch_attention.hopper import HEAD, TILE
from pallas_kernels.patch_attention.tiles import (
    Sight,
    across,
    add_product,
    along,
    biased,
    by_row,
    clear,
    constants,
    matrix,
    own_tile,
    padded,
    positions,
    product,
    reach,
    stages,
    visible,
    walk,
    zeros,
)


def gradients(
    q: Float[Array, "R H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H K"],
    bias: Float[Array, "H W"] | None,
    sight: Sight,
    lse: Float[Array, "H R"],
    do: Float[Array, "R H K"],
    *,
    interpret: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """Gradients of q, k, v and the bias; lse is in units of log 2."""
    streams = [matrix(x) for x in (q, do, k, v)]
    asks = (sight.low < sight.high).astype(jnp.int32)
    lse, *bounds = (padded(x, TILE) for x in (lse, sight.low, sight.high, sight.valid, asks))
    table = [] if bias is None else [bias]
    heads, distances = q.shape[1], 0 if bias is None else bias.shape[1]
    tiles = -(-len(q) // TILE)
    sums = [varying_like(q, (heads, tiles * TILE), jnp.float32)] * (1 + distances)
    others = [lse, *bounds, *table]
    reached = reach(sight.low, sight.high, TILE)
    dq, delta, *dbias = _kernel(
        _queries_program, streams, others, reached, [streams[0]], sums, "patch_attention_dq", interpret
    )
    others, reached = [lse, padded(delta, TILE), *bounds, *table], reach(sight.seen_from, sight.seen_to, TILE)
    dk, dv = _kernel(
        _keys_program, streams, others, reached, streams[2:], [], "patch_attention_dkv", interpret
    )
    dq, dk, dv = (dx[: len(x)].reshape(x.shape) for dx, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, None if bias is None else jnp.stack([jnp.sum(x, 1) for x in dbias], 1)


def _kernel(
    program: Any,
    streams: list[Array],
    others: list[Array],
    reached: tuple[Array, Array],
    like: list[Array],
    sums: list[Any],
    name: str,
    interpret: bool,
) -> list[Array]:
    """`program` for each head of each tile; its results are as `like`, and `sums`."""
    dtype = streams[0].dtype
    return plgpu.kernel(
        partial(program, interpret=interpret),
        out_type=[*(varying_like(x, x.shape, dtype) for x in like), *sums],
        grid=(len(reached[0]), streams[0].shape[1] // HEAD),
        grid_names=("tile", "head"),
        scratch_types=[
            own_tile(TILE, dtype),
            own_tile(TILE, dtype),
            stages(dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )(*streams, *reached, *others)


def _queries_program(*refs: Any, interpret: bool) -> None:
    """dq and delta of one head of one tile of queries, and each query's part of the bias's gradient."""
    q, do, k, v, firsts, counts, lse, low, high, valid, _, *rest = refs
    bias = rest[:1] if len(rest) > 7 else []
    dq, deltas, *dbias, queries, cotangents, loaded, arrived, ready = rest[len(bias) :]
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    own, columns = pl.ds(tile * TILE, TILE), pl.ds(head * HEAD, HEAD)
    low, high, lse = by_row(low.at[own]), by_row(high.at[own]), by_row(lse.at[head, own])

    def weights(tiles: Any, start: Array) -> tuple[Array, Array, Array, Array]:
        """How far back each key is, whether it is visible, p and dp."""
        position = positions(TILE, 1, start)
        back = across(high) - 1 - position
        scores = biased(product(queries, tiles[0].T, interpret), back, bias[0] if bias else None, head)
        seen = visible(back, position >= across(low), along(valid.at[pl.ds(start, TILE)], TILE))
        dp = product(cotangents, tiles[1].T, interpret)
        return back, seen, jnp.exp2(scores - across(lse)), dp

    def add_delta(tiles: Any, start: Array, total: Array) -> Array:
        _, seen, p, dp = weights(tiles, start)
        return total + jnp.where(seen, p * dp, 0.0).sum(axis=1)

    _fetch((q, do), (queries, cotangents), own, columns, ready)
    reached = (firsts[tile], counts[tile])
    delta = walk((k, v), columns, reached, loaded, arrived, add_delta, constants(0.0, TILE))

    def advance(tiles: Any, start: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        acc, *sums = carry
        clear(tiles[0], valid.at[pl.ds(start, TILE)])
        back, seen, p, dp = weights(tiles, start)
        ds = jnp.where(seen, p * (dp - across(delta)), 0.0)
        sums = [total + jnp.where(back == i, ds, 0.0).sum(axis=1) for i, total in enumerate(sums)]
        return add_product(acc, ds.astype(q.dtype), tiles[0], interpret), *sums

    nothing = (zeros(TILE), *(constants(0.0, TILE) for _ in dbias))
    acc, *sums = walk((k, v), columns, reached, loaded, arrived, advance, nothing)
    for total, out in zip((delta, *sums), (deltas, *dbias), strict=True):
        out[head, own] = total
    queries[...] = (acc * HEAD**-0.5).astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, dq.at[own, columns])
    plgpu.wait_smem_to_gmem(0)


def _keys_program(*refs: Any, interpret: bool) -> None:
    """dk and dv of one head of one tile of keys; the rows of its products are keys, the columns queries."""
    q, do, k, v, firsts, counts, lse, delta, low, high, valid, asks, *rest = refs
    *bias, dk, dv, keys, values, loaded, arrived, ready = rest
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    own, columns = pl.ds(tile * TILE, TILE), pl.ds(head * HEAD, HEAD)
    may = across(by_row(valid.at[own]))

    def advance(tiles: Any, start: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        queries, cotangents = tiles
        at = pl.ds(start, TILE)
        clear(queries, asks.at[at])
        position = positions(TILE, 0, tile * TILE)
        back = along(high.at[at], TILE) - 1 - position
        scores = biased(product(keys, queries.T, interpret), back, bias[0] if bias else None, head)
        seen = visible(back, position >= along(low.at[at], TILE), may)
        p = jnp.where(seen, jnp.exp2(scores - along(lse.at[head, at], TILE)), 0.0)
        dp = product(values, cotangents.T, interpret) - along(delta.at[head, at], TILE)
        ds = jnp.where(seen, p * dp, 0.0).astype(q.dtype)
        dk_acc, dv_acc = carry
        dv_acc = add_product(dv_acc, p.astype(q.dtype), cotangents, interpret)
        return add_product(dk_acc, ds, queries, interpret), dv_acc

    _fetch((k, v), (keys, values), own, columns, ready)
    reached = (firsts[tile], counts[tile])
    dk_acc, dv_acc = walk((q, do), columns, reached, loaded, arrived, advance, (zeros(TILE), zeros(TILE)))
    keys[...], values[...] = (dk_acc * HEAD**-0.5).astype(q.dtype), dv_acc.astype(q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(keys, dk.at[own, columns])
    plgpu.copy_smem_to_gmem(values, dv.at[own, columns])
    plgpu.wait_smem_to_gmem(0)


def _fetch(sources: tuple[Any, Any], targets: tuple[Any, Any], rows: Any, columns: Any, ready: Any) -> None:
    """A program's own two tiles, before it goes on."""
    for source, target in zip(sources, targets, strict=True):
        plgpu.copy_gmem_to_smem(source.at[rows, columns], target, ready)
    plgpu.barrier_wait(ready)
