"""What a mask with a rule saves and what it loses: densities, FLOPs, a predicted time, and the error against dense."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._dispatch import current_device
from pallas_kernels.attention import blocks as cut
from pallas_kernels.attention.api import attention_with_lse
from pallas_kernels.attention.arguments import check_arguments
from pallas_kernels.attention.choices import by_query
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.schedule import Tokens, find_live

RATE = 640e12
"""FLOP/s for which times are predicted: what the fastest attention kernels of this folder reach on an H200 in bf16."""


@dataclass(frozen=True)
class Report:
    """The work of a call with a rule, beside that of the same mask without it.

    Attributes:
      block_q, block_k: queries and keys in a block.
      block_density: pairs of blocks that are visited, as a share of those without the rule.
      pair_density: pairs of a query and a key that see each other, as a share of those without the rule.
      full: share of visited pairs of blocks that need no mask.
      longest: blocks that the longest row visits, in units of the mean.
      flops, dense_flops: of the two products over visited pairs of blocks, forward, with the rule and without.
      seconds: `flops` at the rate that was asked for.
      error: of the output, relative to dense attention in norm; None without arrays.
      kept: share of dense attention that falls on visible keys, the mean of queries that see any; None without arrays.
    """

    block_q: int
    block_k: int
    block_density: float
    pair_density: float
    full: float
    longest: float
    flops: float
    dense_flops: float
    seconds: float
    error: float | None = None
    kept: float | None = None


class _Counts(NamedTuple):
    """Pairs of blocks: visited, unmasked, of the longest row; then pairs of tokens, the mean of rows and heads."""

    live: Any
    full: Any
    longest: Any
    visible: Any


def report(mask: Mask, q: Any, k: Any, v: Any = None, *, rate: float = RATE) -> Report:
    """Report what `attention(q, k, v, mask)` visits, and how far it is from attention without the rule.

    Pairs are counted one pair of blocks at a time. The numbers of a call with arrays cost that call and a dense one.

    Args:
      mask: with a rule.
      q, k: queries and keys, or their shapes and dtypes.
      v: values; None for the counts alone.
      rate: FLOP/s of the predicted time.

    Raises:
      ValueError: the mask has no rule, or as `attention`.
    """
    if mask.rule is None:
        raise ValueError("report compares a mask with a rule to the same mask without one: join a rule by &")
    check_arguments(q, k, k if v is None else v, mask, None)
    dense = replace(mask, rule=None)
    grid = cut.choose_blocks(
        q.shape[1],
        k.shape[1],
        interval=mask.interval,
        by_index=mask.positions is None,
        size=cut.CPU_BLOCK if current_device().platform == "cpu" else cut.BLOCK,
        grain=mask.rule.grain,
    )
    found, without = (
        _Counts(*(float(x) for x in jax.jit(partial(_count, grid))(given))) for given in (mask, dense)
    )
    flops = 4.0 * q.shape[0] * q.shape[2] * q.shape[3] * grid.block_q * grid.block_k
    error, kept = (None, None) if v is None else map(float, jax.jit(_compare)(mask, dense, q, k, v))
    return Report(
        block_q=grid.block_q,
        block_k=grid.block_k,
        block_density=found.live / without.live,
        pair_density=found.visible / without.visible,
        full=found.full / max(found.live, 1),
        longest=found.longest * grid.rows / max(found.live, 1),
        flops=flops * found.live,
        dense_flops=flops * without.live,
        seconds=flops * found.live / rate,
        error=error,
        kept=kept,
    )


def _count(grid: cut.Blocks, mask: Mask) -> _Counts:
    q_valid, kv_valid = mask.valid(grid.queries, grid.keys)
    q_ids, kv_ids = (None, None) if mask.segments is None else (mask.segments.q, mask.segments.of_keys)
    here, there = mask.places(grid.queries, grid.keys)

    def tokens(positions: Array, ids: Any, valid: Any, size: int, pad: int, fill: int) -> Tokens:
        tags = jnp.ones_like(positions) if ids is None else ids
        tags = tags if valid is None else jnp.where(valid, tags, fill)
        return Tokens(cut.cut_marks(tags, size, pad, fill), cut.cut_marks(positions, size, pad, 0))

    q = tokens(here, q_ids, q_valid, grid.block_q, grid.pad_q, 0)
    k = tokens(there, kv_ids, kv_valid, grid.block_k, grid.pad_k, -1)
    rule = None if mask.rule is None else by_query(mask.rule, grid.queries)
    rule = jax.tree.map(lambda lists: cut.cut_lists(lists, grid), rule)
    live = find_live(grid, rule, q, k)

    def step(total: Array, i: Any, j: Any, _: Any) -> Array:
        (q_tags, q_at), (k_tags, k_at) = (
            jax.tree.map(lambda x, n=n: x[n], side) for side, n in ((q, i), (k, j))
        )
        pair = q_at[:, None, None, :, None], k_at[:, None, None, None]
        seen = (q_tags[:, :, None] == k_tags[:, None])[:, None, None] & grid.interval.sees(*pair)
        if rule is not None:
            seen = seen & jax.tree.map(lambda lists: lists[i], rule).sees(*pair)
        return total + jnp.mean(seen.astype(jnp.float32), (0, 1, 2)).sum()

    visible = live.schedule().walk(step, jnp.zeros((), jnp.float32))
    counts = jnp.sum(live.some, 1)
    return _Counts(counts.sum(), (live.some & live.full).sum(), counts.max(), visible)


def _compare(
    mask: Mask,
    dense: Mask,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    (o, lse), (right, whole) = (attention_with_lse(q, k, v, each) for each in (mask, dense))
    sees = (whole > -1e29).astype(jnp.float32)
    kept = jnp.sum(jnp.exp(lse - whole) * sees) / jnp.maximum(jnp.sum(sees), 1)
    return jnp.linalg.norm((o - right).reshape(-1)) / jnp.linalg.norm(right.reshape(-1)), kept
