"""Hopper: attention of each query over its own interval of keys, both directions in one kernel.

Neighbouring queries see neighbouring keys: those of a patch are its bytes, those of a byte the W patches up to its
latest. A program takes one head of a tile of queries, and walks over the keys from the first that any of them sees to
the last in tiles of 64, with tensor cores for both products and an online softmax in between. Nothing else is read, so
the work grows with queries and keys, not with their product.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels.patch_attention.hopper import HEAD, LOOKUP_ROWS, POOL_ROWS
from pallas_kernels.patch_attention.lookup_xla import rising
from pallas_kernels.patch_attention.mosaic_gpu_vjp import gradients
from pallas_kernels.patch_attention.pool_xla import slot_of
from pallas_kernels.patch_attention.runs import find_runs
from pallas_kernels.patch_attention.tiles import (
    FLOOR,
    LOG2E,
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


def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
    *,
    interpret: bool = False,
) -> Float[Array, "B N P H K"]:
    """See `patch_attention.pool`; what `hopper.why_not` refuses is not looked at again.

    Args:
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    slots = q.shape[2]
    q, k, v, patch_ids = vary_alike(q, k, v, patch_ids)
    runs, rows = find_runs(patch_ids, slots), slot_of(patch_ids, slots)
    valid = (patch_ids < slots).reshape(-1).astype(jnp.int32)
    sight = Sight(runs.starts, runs.ends, valid, rows, rows + valid)
    flat = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
    o: Any = _attend(*flat, None, sight, POOL_ROWS, interpret)
    return o.reshape(q.shape)


def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
    interpret: bool = False,
) -> Float[Array, "B N S H K"]:
    """See `patch_attention.lookup`, and `pool` above."""
    q, k, v, latest, valid, bias = vary_alike(q, k, v, latest, valid, bias)
    flat = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
    bias = bias.astype(jnp.float32)
    sight = _looking_back(latest, valid, look_back)
    o: Any = _attend(*flat, bias, sight, LOOKUP_ROWS, interpret)
    return o.reshape(q.shape)


def _looking_back(latest: Int[Array, "B N S"], valid: Bool[Array, "B N M"], look_back: int) -> Sight:
    keys = valid.shape[-1]
    own = latest.reshape(-1, latest.shape[-1])
    first = keys * jnp.arange(len(own), dtype=jnp.int32)[:, None]
    high = jnp.where(own >= 0, own + 1 + first, 0).reshape(-1)
    low = (jnp.maximum(own + 1 - look_back, 0) + first).reshape(-1)
    runs = find_runs(rising(latest, keys), keys)
    ends = jnp.pad(runs.ends.reshape(-1, keys), ((0, 0), (0, look_back - 1)), mode="edge")[:, look_back - 1 :]
    seen = valid.reshape(-1)
    to = jnp.where(seen, ends.reshape(-1), 0)
    return Sight(low, high, seen.astype(jnp.int32), runs.starts, to)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attend(
    q: Array, k: Array, v: Array, bias: Array | None, sight: Sight, rows: int, interpret: bool
) -> Float[Array, "R H K"]:
    return _kernel(q, k, v, bias, sight, rows, interpret)[0]


def _forward(
    q: Array, k: Array, v: Array, bias: Array | None, sight: Sight, rows: int, interpret: bool
) -> tuple[Array, Any]:
    o, lse = _kernel(q, k, v, bias, sight, rows, interpret)
    return o, (q, k, v, bias, sight, lse)


def _backward(rows: int, interpret: bool, saved: tuple[Any, ...], do: Array) -> tuple[Any, ...]:
    del rows
    q, k, v, bias, sight, lse = saved
    return *gradients(q, k, v, bias, sight, lse, do, interpret=interpret), None


_attend.defvjp(_forward, _backward)


def _kernel(
    q: Array, k: Array, v: Array, bias: Array | None, sight: Sight, rows: int, interpret: bool
) -> tuple[Float[Array, "R H K"], Float[Array, "H R"]]:
    """Output, and log-sum-exp in units of log 2, at least `FLOOR`."""
    (queries, heads, _), tiles = q.shape, -(-q.shape[0] // rows)
    streams = [matrix(x) for x in (q, k, v)]
    bounds = [padded(x, rows) for x in (sight.low, sight.high, sight.valid)]
    o, lse = plgpu.kernel(
        partial(_program, rows=rows, interpret=interpret),
        out_type=[
            varying_like(q, streams[0].shape, q.dtype),
            varying_like(q, (heads, tiles * rows), jnp.float32),
        ],
        grid=(tiles, heads),
        grid_names=("tile", "head"),
        scratch_types=[
            own_tile(rows, q.dtype),
            stages(q.dtype),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name="patch_attention",
    )(*streams, *reach(sight.low, sight.high, rows), *bounds, *([] if bias is None else [bias]))
    return o[:queries].reshape(q.shape), lse[:, :queries]


def _program(*refs: Any, rows: int, interpret: bool) -> None:
    """One head of one tile of queries."""
    q, k, v, firsts, counts, low, high, valid, *bias, o, lse, queries, loaded, sums, arrived, ready = refs
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    own, columns = pl.ds(tile * rows, rows), pl.ds(head * HEAD, HEAD)
    low, high = by_row(low.at[own]), by_row(high.at[own])

    def advance(tiles: Any, start: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        keys, values = tiles
        clear(values, valid.at[pl.ds(start, HEAD)])
        position = positions(rows, 1, start)
        back = across(high) - 1 - position
        scores = biased(product(queries, keys.T, interpret), back, bias[0] if bias else None, head)
        seen = visible(back, position >= across(low), along(valid.at[pl.ds(start, HEAD)], rows))
        scores = jnp.where(seen, scores, 2 * FLOOR)
        higher = jnp.maximum(top, scores.max(axis=1))
        keep, p = jnp.exp2(top - higher), jnp.exp2(scores - across(higher))
        acc = add_product(acc * across(keep), p.astype(q.dtype), values, interpret)
        return acc, higher, total * keep + p.sum(axis=1)

    plgpu.copy_gmem_to_smem(q.at[own, columns], queries, ready)
    plgpu.barrier_wait(ready)
    start = (zeros(rows), constants(FLOOR, rows), constants(0.0, rows))
    reached = (firsts[tile], counts[tile])
    acc, top, total = walk((k, v), columns, reached, loaded, arrived, advance, start)
    some = jnp.where(total > 0, total, 1.0)
    queries[...] = (acc / across(some)).astype(q.dtype)
    sums[...] = jnp.where(total > 0, top + jnp.log(some) * LOG2E, FLOOR)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(queries, o.at[own, columns])
    plgpu.copy_smem_to_gmem(sums, lse.at[head, own])
    plgpu.wait_smem_to_gmem(0)
