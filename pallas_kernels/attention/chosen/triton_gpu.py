"""Attention to the blocks of `Chosen` on NVIDIA GPUs: two Triton kernels called through jax-triton, and their merge.

A tile of queries that visited the union of its tokens' blocks would compute pairs that most of its tokens hide. So work
goes by blocks of keys instead: tokens are sorted by the blocks that they choose, on the device, and a program takes the
tokens of a block. It writes a partial result for each block of a token (`triton_kernel`). The log-sum-exp merge
and the sum of dq are XLA's. Partial results of at most `ROOM` bytes exist at a time.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels._compat import count_below, vary_alike
from pallas_kernels._dispatch import current_device
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention.choices import Chosen, by_query
from pallas_kernels.attention.masks import EMPTY_LSE, Mask
from pallas_kernels.attention.rules import Interval
from pallas_kernels.attention.triton_rows import over_more_rows

BLOCKS = (16, 32, 64, 128)
"""Keys in a block that the kernels take."""

MOST_SHARED = 64
"""Query heads that share a key head, at most."""

ROOM = 1 << 31
"""Bytes of partial results, from which queries are taken in several strips."""

NEVER = 1 << 30
"""A bound of an interval that has none."""


class Tile(NamedTuple):
    """Queries of a tile, over all heads of a group; warps, stages of the loop, and programs that share a block."""

    rows: int
    warps: int
    stages: int
    parts: int


FORWARD, BACKWARD, WIDE = Tile(64, 4, 3, 4), Tile(32, 4, 3, 4), Tile(32, 8, 2, 4)
"""The tiles of the two kernels; the last one is of gradients in blocks of 128, where twice the rows spill registers."""


class Work(NamedTuple):
    """The tokens of each block, by lists; a pair is a token's place in a strip of queries, times COUNT, plus a rank.

    Attributes:
      rows: blocks, those of most tokens first.
      starts: of each block where its pairs begin in `order`, then where those of no block begin.
      order: pairs, sorted by block; last those that name no block, or one that the list has named already.
      there: whether a token's list names a block at a rank, and not once more.
    """

    rows: Int[Array, "B L blocks"]
    starts: Int[Array, "B L blocks_and_1"]
    order: Int[Array, "B L pairs"]
    there: Bool[Array, "B L T n"]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Plan:
    """The static side of a call: sizes, the interval of keys around a query, the scale, and the two tiles."""

    keys: int
    groups: int
    block: int
    interval: Interval
    scale: float
    forward: Tile
    backward: Tile

    @property
    def blocks(self) -> int:
        return -(-self.keys // self.block)


def why_not(q: Any, k: Any, mask: Mask) -> str | None:
    """Return why the kernels cannot run a call with lists, of which `triton_why` has checked all but the mask."""
    rule, share = mask.rule, q.shape[2] // k.shape[2]
    if mask.positions is not None or not isinstance(rule, Chosen):
        return "it takes lists over indices, joined to no other rule, and this mask reads positions or joins rules"
    if rule.block not in BLOCKS:
        return f"it takes chosen blocks of {', '.join(map(str, BLOCKS))} keys, not of {rule.block}"
    if share & (share - 1) or share > MOST_SHARED:
        return f"a power of 2 of query heads up to {MOST_SHARED} share a key head, not {share}"
    if 0 in (*q.shape, *k.shape, rule.lists.shape[-1]):
        return "there is nothing to compute"
    return None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> Float[Array, "B T H K"]:
    """Return the output in q's dtype; what `why_not` refuses is not checked again."""
    rule: Any = by_query(mask.rule, q.shape[1])  # pyright: ignore[reportArgumentType]
    by = q.shape[-1] ** -0.5 if scale is None else float(scale)
    plan = Plan(
        k.shape[1], k.shape[2], rule.block, mask.interval, by, FORWARD, WIDE if rule.block > 64 else BACKWARD
    )
    tags = mask.tags(q.shape[1], k.shape[1]) if mask.has_tags else (None, None)
    q_tags, k_tags = (None if x is None else jnp.broadcast_to(x, (len(q), x.shape[1])) for x in tags)
    return _attend(plan, *vary_alike(q, k, v, rule.lists, q_tags, k_tags))


@partial(OwnGradient, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, lists: Array, q_tags: Any, k_tags: Any) -> Array:
    return _keep(plan, q, k, v, lists, q_tags, k_tags)[0]


def _keep(
    plan: Plan, q: Array, k: Array, v: Array, lists: Array, q_tags: Any, k_tags: Any
) -> tuple[Array, tuple[Any, ...]]:
    strips = _count_strips(q, lists)

    def attend(given: Any) -> tuple[Array, Array]:
        first, q, lists, q_tags = given
        return vary_alike(*_forward(plan, first, q, k, v, lists, q_tags, k_tags), q)[:2]

    o, level = (join_strips(x, q.shape[1]) for x in lax.map(attend, _cut(strips, q, lists, q_tags)))
    return o, (q, k, v, lists, q_tags, k_tags, o, level)


def _gradients(plan: Plan, kept: Any, do: Array) -> tuple[Any, ...]:
    q, k, v, lists, q_tags, k_tags, o, level = kept
    strips = _count_strips(q, lists)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), -1)

    def step(sums: Any, given: Any) -> tuple[Any, Array]:
        first, q, lists, q_tags, *rest = given
        dq, *found = _backward(plan, first, q, k, v, lists, q_tags, k_tags, *rest)
        return [a + b for a, b in zip(sums, found, strict=True)], dq

    zeros = [jnp.zeros(x.shape, jnp.float32) for x in (k, v)]
    cut = _cut(strips, q, lists, q_tags, do, level, delta)
    (dk, dv), dq = lax.scan(step, list(vary_alike(*zeros, do)[:2]), cut)
    return join_strips(dq, q.shape[1]), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend.defvjp(_keep, _gradients)


def _count_strips(q: Array, lists: Array) -> int:
    return count_strips(q.size * q.dtype.itemsize * lists.shape[-1], q.shape[1], ROOM)


def count_strips(size: int, queries: int, room: int) -> int:
    """Return in how many strips to take queries, so that one writes at most `room` of all `size` bytes."""
    strips = 1
    while size > room * strips and strips < queries:
        strips *= 2
    return strips


def _cut(strips: int, q: Array, lists: Array, *others: Any) -> tuple[Any, ...]:
    """Return the index of each strip's first query, and arrays [B, T, ...] by strip; lists are [B, L, T, n]."""
    # Let queries behind the last one choose nothing
    lists = cut_strips(strips, lists.swapaxes(1, 2), fill=-1).swapaxes(2, 3)
    first = jnp.arange(strips, dtype=jnp.int32)[:, None] * -(-q.shape[1] // strips)
    others = jax.tree.map(partial(cut_strips, strips), others)
    return jnp.broadcast_to(first, (strips, len(q))), cut_strips(strips, q), lists, *others


def cut_strips(
    strips: int, x: Shaped[Array, "B T ..."], *, fill: int = 0
) -> Shaped[Array, "strips B size ..."]:
    """Cut the tokens into strips of one size; `fill` stands behind the last token."""
    if short := -x.shape[1] % strips:
        x = jnp.pad(x, ((0, 0), (0, short), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], strips, -1, *x.shape[2:]), 1, 0)


def join_strips(x: Shaped[Array, "strips B size ..."], length: int) -> Shaped[Array, "B T ..."]:
    """Return the first `length` tokens of strips."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def sort_tokens(lists: Int[Array, "B L T n"], blocks: int) -> Work:
    """Sort the tokens of lists by the blocks that they name."""
    count, pairs = lists.shape[3], math.prod(lists.shape[2:])
    earlier = jnp.tri(count, k=-1, dtype=bool)[None, None, None]
    repeated = jnp.any((lists[..., None, :] == lists[..., None]) & earlier, -1)
    there = (lists >= 0) & (lists < blocks) & ~repeated
    number = jnp.where(there, lists, blocks).reshape(*lists.shape[:2], pairs)
    place = jnp.broadcast_to(jnp.arange(pairs, dtype=jnp.int32), number.shape)
    if (blocks + 1) * pairs < 1 << 31:
        # Sort one number a pair: it takes a third of the traffic of two numbers in a stable order.
        both = lax.sort(number * pairs + place, is_stable=False)
        number, order = both // pairs, both % pairs
    else:
        number, order = lax.sort((number, place), num_keys=1, is_stable=True)
    wanted = jnp.arange(blocks + 1, dtype=jnp.int32)
    starts = jax.vmap(jax.vmap(lambda line: count_below(line, wanted)))(number)
    rows = jnp.argsort(starts[..., :-1] - starts[..., 1:], -1).astype(jnp.int32)
    return Work(rows, starts, order, there)


@jax.custom_batching.custom_vmap
def _forward(
    plan: Plan,
    first: Int[Array, "B"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    lists: Int[Array, "B L T n"],
    q_tags: Int[Array, "B T"] | None,
    k_tags: Int[Array, "B S"] | None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Return the output, and the log-sum-exp / log 2, which is large where a query sees nothing."""
    from pallas_kernels.attention.chosen.triton_kernel import attend_chosen

    work = sort_tokens(lists, plan.blocks)
    shape = (*q.shape[:2], lists.shape[-1], *q.shape[2:])
    found = jax.ShapeDtypeStruct(shape, q.dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    o, lse = _call(attend_chosen, plan, plan.forward, first, (q, k, v), (q_tags, k_tags), work, found)
    there = _by_head(work.there, q.shape[2])
    lse = jnp.where(there, lse, EMPTY_LSE)
    top = jnp.maximum(jnp.max(lse, 2, keepdims=True), EMPTY_LSE / 2)
    weights = jnp.exp2(lse - top)
    total = jnp.sum(weights, 2)
    weights = weights / jnp.maximum(total, 1e-30)[:, :, None]
    level = jnp.where(total > 0, top[:, :, 0] + jnp.log2(total), -EMPTY_LSE)
    return _sum_ranks(o, there, weights).astype(q.dtype), level


@jax.custom_batching.custom_vmap
def _backward(
    plan: Plan,
    first: Int[Array, "B"],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    lists: Int[Array, "B L T n"],
    q_tags: Int[Array, "B T"] | None,
    k_tags: Int[Array, "B S"] | None,
    do: Float[Array, "B T H K"],
    level: Float[Array, "B T H"],
    delta: Float[Array, "B T H"],
) -> tuple[Array, Float[Array, "B S G K"], Float[Array, "B S G K"]]:
    """Return dq in q's dtype, and what these queries add to dk and dv."""
    from pallas_kernels.attention.chosen.triton_kernel import chosen_gradients

    work, tile = sort_tokens(lists, plan.blocks), plan.backward
    of_queries = jax.ShapeDtypeStruct((*q.shape[:2], lists.shape[-1], *q.shape[2:]), q.dtype)
    of_keys = jax.ShapeDtypeStruct((len(k), tile.parts, plan.blocks * plan.block, *k.shape[2:]), jnp.float32)
    arrays, found = (q, k, v, do, level, delta), (of_queries, of_keys, of_keys)
    dq, dk, dv = _call(chosen_gradients, plan, tile, first, arrays, (q_tags, k_tags), work, found)
    dk, dv = (jnp.sum(x, 1)[:, : plan.keys] for x in (dk, dv))
    return _sum_ranks(dq, _by_head(work.there, q.shape[2])).astype(q.dtype), dk, dv


_forward.def_vmap(over_more_rows(_forward))
_backward.def_vmap(over_more_rows(_backward))


def _by_head(there: Bool[Array, "B L T n"], heads: int) -> Bool[Array, "B T n H"]:
    return jnp.moveaxis(jnp.repeat(there, heads // there.shape[1], 1), 1, 3)


def _sum_ranks(
    x: Float[Array, "B T n H K"],
    there: Bool[Array, "B T n H"],
    weights: Float[Array, "B T n H"] | None = None,
) -> Float[Array, "B T H K"]:
    """Return the weighted sum, in fp32, over the ranks at which there is a block; what else is there is not read."""
    total = jnp.zeros((), jnp.float32)
    for rank in range(x.shape[2]):
        part = jnp.where(there[:, :, rank, :, None], x[:, :, rank].astype(jnp.float32), 0)
        total += part if weights is None else part * weights[:, :, rank, :, None]
    return total


def _call(
    kernel: Any,
    plan: Plan,
    tile: Tile,
    first: Array,
    arrays: tuple[Array, ...],
    tags: tuple[Any, Any],
    work: Work,
    outputs: tuple[Any, ...],
) -> Any:
    """Run a kernel for every block of keys, its parts, every key head and every row of the batch."""
    import jax_triton

    q, k = arrays[:2]
    share, bounds = q.shape[2] // k.shape[2], (plan.interval.before, plan.interval.after)
    major, minor = current_device().capability or (9, 0)
    return jax_triton.triton_call(
        *arrays,
        *((q, q) if tags[0] is None else tags),
        *(work.rows, work.starts, work.order, first),
        kernel=kernel,
        out_shape=outputs,
        grid=(tile.parts * plan.blocks * q.shape[0] * k.shape[2],),
        name=kernel.__name__,
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * major + minor,
        T=q.shape[1],
        S=plan.keys,
        HEADS=q.shape[2],
        GROUPS=k.shape[2],
        LISTS=work.there.shape[1],
        WIDTH=q.shape[3],
        SCALE=plan.scale,
        TOKENS=max(1, tile.rows // share),
        BLOCK=plan.block,
        BLOCKS=plan.blocks,
        COUNT=work.there.shape[3],
        PARTS=tile.parts,
        BEFORE=NEVER if bounds[0] is None else bounds[0],
        AFTER=NEVER if bounds[1] is None else bounds[1],
        INTERVAL=bounds != (None, None),
        TAGS=tags[0] is not None,
    )
