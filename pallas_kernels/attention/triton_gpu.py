"""Block-sparse attention on NVIDIA GPUs: three Triton kernels called through jax-triton, and their gradients.

Each runs a loop of FlashAttention-2 (Dao, 2307.08691) over the live tiles of a row, so time falls with the density of a
rule. The forward pass keeps o and the log-sum-exp. The backward pass has a kernel for dq and one for dk and dv.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import current_device
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.choices import Chosen
from pallas_kernels.attention.chosen import triton_gpu as chosen_blocks
from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.triton_lists import Lists, Tiles, choose_lists, find_tiles, make_lists
from pallas_kernels.attention.triton_rows import over_more_rows
from pallas_kernels.attention.triton_why import Plan, Tile, make_plan, whole_queries

FEW = 128
"""Programs that leave most of a GPU idle."""


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    alibi_slopes: None = None,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output in q's dtype; what `triton_why.why_not` refuses is not checked again."""
    del alibi_slopes
    if isinstance(mask.rule, Chosen):
        return chosen_blocks.attention(q, k, v, mask, scale=scale)
    return _call_with_tags(make_plan(current_device(), q, k, mask, scale), q, k, v, mask, None)


def split_attention(
    q: Float[Array, "B t H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    runs: tuple[tuple[int, ...], ...],
    device: Int[Array, ""],
    *,
    scale: float | None = None,
) -> Float[Array, "B t H K"]:
    """Return the output of a device's queries; what `triton_why.why_not_split` refuses is not checked again."""
    plan = replace(make_plan(current_device(), whole_queries(q, runs), k, mask, scale), runs=runs)
    return _call_with_tags(plan, q, k, v, mask, jnp.broadcast_to(device, q.shape[:1]))


def _call_with_tags(plan: Plan, q: Array, k: Array, v: Array, mask: Mask, device: Array | None) -> Array:
    tags = mask.tags(q.shape[1], k.shape[1]) if mask.has_tags else (None, None)
    q_tags, k_tags = (None if x is None else jnp.broadcast_to(x, (len(q), x.shape[1])) for x in tags)
    return _attend(plan, *vary_alike(q, k, v, q_tags, k_tags, device))


@partial(OwnGradient, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, q_tags: Any, k_tags: Any, device: Any) -> Array:
    return vary_alike(_forward(plan, q, k, v, q_tags, k_tags, device)[0], q)[0]


def _keep(plan: Plan, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    o, lse = vary_alike(*_forward(plan, *arrays), arrays[0])[:2]
    return o, (*arrays, o, lse)


def _gradients(plan: Plan, kept: Any, do: Array) -> tuple[Any, ...]:
    return *vary_alike(*_backward(plan, *kept, do), do)[:3], None, None, None


_attend.defvjp(_keep, _gradients)


@jax.custom_batching.custom_vmap
def _forward(
    plan: Plan,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_tags: Int[Array, "B T"] | None,
    k_tags: Int[Array, "B S"] | None,
    device: Int[Array, "B"] | None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    """Return the output and the log-sum-exp; `device`, one number for all rows, is the index of a plan with runs."""
    from pallas_kernels.attention.triton_kernel import attend

    lse = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    return _call(attend, plan, plan.kernels.forward, (q, k, v), (q_tags, k_tags, device), (q, lse))


@jax.custom_batching.custom_vmap
def _backward(
    plan: Plan,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    q_tags: Int[Array, "B T"] | None,
    k_tags: Int[Array, "B S"] | None,
    device: Int[Array, "B"] | None,
    o: Float[Array, "B T H K"],
    lse: Float[Array, "B H T"],
    do: Float[Array, "B T H K"],
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv."""
    from pallas_kernels.attention.triton_kernel import keys_gradient, queries_gradient

    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1).swapaxes(1, 2)
    # Keep 2^(score - level) 0 for a query that sees nothing.
    level = jnp.where(lse > EMPTY_LSE / 2, lse, -EMPTY_LSE) * math.log2(math.e)
    arrays, tags, kernels = (q, k, v, do, level, delta), (q_tags, k_tags, device), plan.kernels
    (dq,) = _call(queries_gradient, plan, kernels.queries, arrays, tags, (q,))
    share = _spread(plan, q, k)
    wide = [jnp.repeat(x, share, axis=2) for x in (k, v)]
    shape = jax.ShapeDtypeStruct(wide[0].shape, k.dtype if share == 1 else jnp.float32)
    arrays = (q, *wide, *arrays[3:])
    dk, dv = _call(keys_gradient, plan, kernels.keys, arrays, tags, (shape, shape), by_key=True)
    if share > 1:
        dk, dv = (x.reshape(*k.shape[:3], share, -1).sum(3).astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def _spread(plan: Plan, q: Array, k: Array) -> int:
    """Return how often to repeat key heads for their gradient: once a query head if programs are few, else 1."""
    programs = plan.grid(plan.kernels.keys, transposed=True).columns * k.shape[0] * k.shape[2]
    return q.shape[2] // k.shape[2] if programs < FEW else 1


def _call(
    kernel: Any,
    plan: Plan,
    tile: Tile,
    arrays: tuple[Array, ...],
    tags: tuple[Any, Any, Any],
    outputs: tuple[Any, ...],
    *,
    by_key: bool = False,
) -> Any:
    """Run a kernel for every row of its lists, every head of that side and every row of the batch."""
    import jax_triton

    (q, k), packed = arrays[:2], tags[0] is not None
    lists = _lists(plan, plan.grid(tile, transposed=by_key), *tags, by_key=by_key)
    major, minor = current_device().capability or (9, 0)
    return jax_triton.triton_call(
        *arrays,
        *(tags[:2] if packed else (q, q)),
        *lists,
        kernel=kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        grid=(lists.rows.shape[-1] * q.shape[0] * (k if by_key else q).shape[2],),
        name=kernel.__name__,
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * major + minor,
        T=q.shape[1],
        S=k.shape[1],
        HEADS=q.shape[2],
        GROUPS=k.shape[2],
        WIDTH=q.shape[3],
        SCALE=plan.scale,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        PAIRS=lists.numbers.shape[-1],
        TAGS=packed,
    )


def _lists(plan: Plan, grid: Blocks, q_tags: Any, k_tags: Any, device: Any, *, by_key: bool) -> Lists:
    """Return the lists of a kernel: of this device's rows, if the plan says which they are."""
    tiles: Any = find_tiles(grid, plan.rule)
    assert isinstance(tiles, Tiles), tiles
    axes: Any = (0, 0, 0, 0, None)

    def find(tiles: Tiles) -> Lists:
        make = partial(make_lists, grid, tiles, transposed=by_key)
        return make(None, None) if q_tags is None else jax.vmap(make, out_axes=Lists(*axes))(q_tags, k_tags)

    if device is None:
        return find(tiles)
    parts = (plan.rows_of(each, grid.rows) for each in range(len(plan.runs)))
    return choose_lists([find(tiles.of_rows(rows)) for rows in parts], device[0])


_forward.def_vmap(over_more_rows(_forward))
_backward.def_vmap(over_more_rows(_backward))
