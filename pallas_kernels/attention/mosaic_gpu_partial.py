"""Hopper: partial attention, merged into that over other keys before anything is rounded.

A program takes 128 queries of one head. One warpgroup copies tiles of 128 keys and their values to shared memory, two
compute, 64 queries each:

    s = q k^T,   m' = max(m, max s),   p = exp(s - m'),   l' = exp(m - m') l + sum p,   acc' = exp(m - m') acc + p v

with the scores of the next tile and p v of this one on the tensor cores at a time, and the two warpgroups in turns, so
that one has its exponentials where the other has its products. Tiles come last to first: the last one alone has keys
that some query does not see. The accumulator is copied meanwhile and merged at the end, in fp32: one read and one write
of an output where a merge of its own reads two and writes one. An output in q's dtype leaves from the queries' place.

Source: Shah et al., FlashAttention-3, 2407.08608; Liu et al., Ring Attention, 2310.01889.
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
from pallas_kernels._mosaic_gpu import APPROXIMATE, mosaic_kernel, tile_ref
from pallas_kernels.attention.hopper import ROWS, TILE
from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.tiles import (
    LOG2E,
    Call,
    Stages,
    across,
    add_product,
    by_row,
    call_of,
    constants,
    feed,
    limits,
    matrix,
    per_query,
    product,
    stages,
    visible,
    zeros,
)

FLOOR = -1e30
"""The least maximum of a row of scores, in units of log 2: exp(score - maximum) is 0 where none is visible."""


def attention_with_lse(
    q: Float[Array, "R T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    accumulator: tuple[Float[Array, "R T H K"], Float[Array, "R H T"]] | None = None,
    cast_output: bool = False,
    scale: float | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "R T H K"], Float[Array, "R H T"]]:
    """Give output and log-sum-exp over these keys and the accumulator's, in fp32; `hopper` is not asked again.

    Args:
      q: R / B rows in a row for each row of keys.
      accumulator: output and log-sum-exp over other keys.
      cast_output: give the output in q's dtype.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    (batch, queries, heads, width), call = q.shape, call_of(q, k, mask, scale, interpret)
    before = (
        [] if accumulator is None else [matrix(accumulator[0].astype(jnp.float32)), per_query(accumulator[1])]
    )
    streams = vary_alike(matrix(q), matrix(k), matrix(v), *limits(mask, k.shape[1]), *before)
    o, lse = mosaic_kernel(
        partial(_program, call=call),
        out_type=[
            varying_like(streams[0], streams[0].shape, q.dtype if cast_output else jnp.float32),
            varying_like(streams[0], (batch, heads, call.tiles * TILE), jnp.float32),
        ],
        grid=(call.tiles, batch, heads),
        grid_names=("tile", "row", "head"),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(q.dtype, width),
        compiler_params=APPROXIMATE,
        interpret=interpret,
        kernel_name="partial_attention",
    )(*streams)
    return o[:, :queries].reshape(q.shape), lse[..., :queries]


class Shared(NamedTuple):
    """Return a program's shared memory: queries and outputs of each warpgroup, keys, values, and whose turn it is."""

    queries: Any
    outputs: Any
    asked: Any
    joined: Any
    keys: Stages
    values: Stages
    turns: Any


def _scratch(dtype: Any, width: int) -> Any:
    count, pair = 256 // width, plgpu.Barrier(num_barriers=2)
    queries, outputs = (tile_ref(2, ROWS, width, dtype=x) for x in (dtype, jnp.float32))
    keys, values = (stages(count, tile_ref(count, TILE, width, dtype=dtype)) for _ in "kv")
    return [Shared(queries, outputs, pair, pair, keys, values, pair)]


def _program(*refs: Any, call: Call) -> None:
    """Attend with 128 queries of one head; those that see most keys come first."""
    q, k, v, *given, o, lse, shared = refs
    row, head, worker = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("warpgroup")
    tile = call.tiles - 1 - lax.axis_index("tile")
    limit = given.pop(0)[row] if call.limited else jnp.int32(call.keys)
    steps = jnp.maximum(pl.cdiv(limit, jnp.int32(TILE)), 1)
    if call.causal:
        steps = jnp.minimum(steps, tile + 1)

    @pl.when(worker == 2)
    def _() -> None:
        plgpu.set_max_registers(24, action="decrease")
        columns = pl.ds(head // call.ratio * call.width, call.width)

        def boxes(step: Array) -> Any:
            box = (row // call.runs, pl.ds((steps - 1 - step) * TILE, TILE), columns)
            return (k.at[box],), (v.at[box],)

        feed((shared.keys, shared.values), boxes, steps)

    @pl.when(worker < 2)
    def _() -> None:
        plgpu.set_max_registers(240, action="increase")
        first = tile * TILE + worker * ROWS
        own, at = pl.ds(first, ROWS), (row, head, pl.ds(first, ROWS))
        box = (row, own, pl.ds(head * call.width, call.width))
        queries, outputs = shared.queries.at[worker], shared.outputs.at[worker]
        plgpu.copy_gmem_to_smem(q.at[box], queries, shared.asked.at[worker])
        if given:
            plgpu.copy_gmem_to_smem(given[0].at[box], outputs, shared.joined.at[worker])
        plgpu.barrier_wait(shared.asked.at[worker])
        acc, total, own_lse = _attend(shared, worker, first, limit, steps, call)
        if given:
            before = by_row(given[1].at[at])
            plgpu.barrier_wait(shared.joined.at[worker])
            held = plgpu.load(outputs, layout=plgpu.Layout.WGMMA)
            keep, add, own_lse = _weights(before, own_lse)
            acc = held * across(keep, call.width) + acc * across(add / total, call.width)
        else:
            acc = acc * across(1 / total, call.width)
        result = outputs if o.dtype == jnp.float32 else queries
        result[...] = acc.astype(o.dtype)
        lse[at] = own_lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, o.at[box])
        plgpu.wait_smem_to_gmem(0)


def _attend(
    shared: Shared, worker: Array, first: Array, limit: Array, steps: Array, call: Call
) -> tuple[Array, Array, Array]:
    """Return sum p v, sum p (1 where it is 0) and log-sum-exp of one warpgroup's queries."""
    keys, values, queries = shared.keys, shared.values, shared.queries.at[worker]
    factor = call.scale * LOG2E
    (tiles,), count = values.tiles, keys.tiles[0].shape[0]

    def soften(scores: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        """Return what to keep of sums until now, the new maximum and sum, and p."""
        higher = jnp.maximum(top, scores.max(axis=1) * factor)
        keep, p = jnp.exp2(top - higher), jnp.exp2(scores * factor - across(higher, TILE))
        return keep, higher, total * keep + p.sum(axis=1), p

    def advance(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the scores of the next tile, while the values of this one are added."""
        acc, top, total, p = carry
        slot, after = step % count, (step + 1) % count
        plgpu.barrier_wait(values.there.at[slot])
        plgpu.barrier_wait(shared.turns.at[worker])
        operands = (queries, keys.tiles[0].at[after].T, p, tiles.at[slot])

        def scored(scores: Array) -> tuple[Array, ...]:
            plgpu.barrier_arrive(keys.free.at[after])
            found = lax.optimization_barrier(soften(scores, top, total))
            # A branch, or the assembler puts the exponentials after the wait for p v.
            pl.when(step + 2 < steps)(partial(plgpu.barrier_wait, keys.there.at[(step + 2) % count]))
            return found

        issued = partial(plgpu.barrier_arrive, shared.turns.at[1 - worker])
        acc, (keep, top, total, p) = _two_products(acc, operands, issued, scored, call.simulated)
        plgpu.barrier_arrive(values.free.at[slot])
        return acc * across(keep, call.width), top, total, p.astype(queries.dtype)

    pl.when(worker == 1)(partial(plgpu.barrier_arrive, shared.turns.at[0]))
    plgpu.barrier_wait(keys.there.at[0])
    scores = product(queries, keys.tiles[0].at[0].T)
    plgpu.barrier_arrive(keys.free.at[0])
    seen = visible(first, (steps - 1) * TILE, limit, call.causal)
    _, top, total, p = soften(jnp.where(seen, scores, -jnp.inf), constants(FLOOR), constants(0.0))
    pl.when(steps > 1)(partial(plgpu.barrier_wait, keys.there.at[1]))
    carry = (zeros(call.width), top, total, p.astype(queries.dtype))
    acc, top, total, p = lax.fori_loop(0, steps - 1, advance, carry)
    last = (steps - 1) % count
    plgpu.barrier_wait(values.there.at[last])
    acc = add_product(acc, p, tiles.at[last], call.simulated)
    plgpu.barrier_arrive(values.free.at[last])
    pl.when(worker == 0)(partial(plgpu.barrier_wait, shared.turns.at[0]))
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return acc, total, jnp.where(some, top / LOG2E + jnp.log(total), EMPTY_LSE)


def _weights(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Return the weights of two outputs and their joint log-sum-exp."""
    top = jnp.maximum(a, b)
    keep, add = jnp.exp(a - top), jnp.exp(b - top)
    return keep / (keep + add), add / (keep + add), top + jnp.log(keep + add)


def _two_products(
    acc: Array, operands: tuple[Any, ...], issued: Any, scored: Any, simulated: bool
) -> tuple[Array, Any]:
    """Return acc + p v, and scored(q k^T), which runs while p v may still be under way; `issued` runs before both."""
    q, k, p, v = operands
    if simulated:
        issued()
        acc = add_product(acc, p, v, simulated)
        return acc, scored(product(q, k))

    def both(refs: Any) -> None:
        total, *results = refs

        def multiply(scores: Any) -> Array:
            plgpu.wgmma(scores, q, k)
            plgpu.wgmma(total, p, v)
            issued()
            return plgpu.wgmma_accumulator_load(scores, wait_n=1)

        shape = (q.shape[0], k.shape[1])
        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        for ref, result in zip(results, scored(scores), strict=True):
            ref[...] = result

    run: Any = pl.run_state(both)
    zero = constants(0.0)
    acc, *results = run((plgpu.WGMMAAccumulatorRef.init(acc), zero, zero, zero, zeros(k.shape[1])))
    return acc, results
