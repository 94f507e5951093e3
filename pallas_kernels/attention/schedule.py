"""Which pairs of blocks a mask with a rule visits: compressed rows of full and partial blocks, longest rows first.

What is known when a program is compiled is computed by numpy while it is traced. Where a mask reads arrays (documents,
positions, lengths, chosen lists) the same arithmetic runs on the device. The list then has room for all pairs, and a
loop ends behind the live ones.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.rules import Bounds, Box, Interval, Rule, Span, evaluate_apart

LEAST_BLOCK, MOST_BLOCKS = 128, 512
"""Tokens of a block, and blocks of a side, by which a rule that hides nothing is told."""
SAMPLED = 64
"""Queries and keys that are tried first. Most rules hide one of their pairs, and trying all of a `Custom` is slow."""


class Schedule(NamedTuple):
    """Live pairs of blocks, row after row; a row is a block of queries, or of keys after `transposed`.

    Attributes:
      rows: the rows by their number of live pairs, the longest first.
      starts: where the pairs of each of them begin, and where the last one ends.
      pairs: (query block, key block, 1 if some of its tokens are hidden). Of a row the full ones come first.
      count: live pairs, where they are known on the device only; None if `pairs` are all live.
    """

    rows: Any
    starts: Any
    pairs: Any
    count: Any = None

    def walk[C](self, step: Callable[[C, Any, Any, Any], C], start: C) -> C:
        """Return `start` after `step(carry, query block, key block, partial)` for each live pair."""
        if self.count is None:
            over = lambda carry, pair: (step(carry, *pair), None)  # noqa: E731
            return lax.scan(over, start, jnp.asarray(self.pairs))[0]
        return lax.fori_loop(0, self.count, lambda i, carry: step(carry, *self.pairs[i]), start)


class Live(NamedTuple):
    """Pairs of blocks [n, m]: those in which a query sees a key, and those in which every one sees every key."""

    some: Any
    full: Any

    def schedule(self, *, transposed: bool = False) -> Schedule:
        """Return the pairs in order, by query block or, if `transposed`, by key block."""
        some, full = (x.T for x in self) if transposed else self
        xp = np if isinstance(some, np.ndarray) else jnp
        counts = xp.sum(some, 1, dtype=np.int32)
        rows = xp.argsort(-counts, stable=True)
        some, partial, lengths = some[rows], (~full[rows]).astype(np.int32), counts[rows]
        place = 2 * xp.arange(len(rows), dtype=np.int32)[:, None] + partial
        order = xp.argsort(xp.where(some, place, 2 * len(rows)).reshape(-1), stable=True)
        starts = xp.concatenate([xp.zeros(1, np.int32), xp.cumsum(lengths, dtype=np.int32)])
        order = order[: int(starts[-1])] if xp is np else order
        row, column = rows[order // some.shape[1]], order % some.shape[1]
        ends = (column, row) if transposed else (row, column)
        pairs = xp.stack([*ends, partial.reshape(-1)[order]], 1).astype(np.int32)
        return Schedule(rows, starts, pairs, None if xp is np else starts[-1])


class Tokens(NamedTuple):
    """Numbers of the tokens of blocks, [blocks, B, tokens]: tags that must be equal, and positions.

    Tags are > 0 of tokens and otherwise differ between queries and keys; None if all are tokens of one document.
    Positions are None if they are indices.
    """

    tags: Int[Array, "n B size"] | None
    positions: Int[Array, "n B size"] | None


def find_live(grid: Blocks, rule: Rule | None, q: Tokens, k: Tokens) -> Live:
    """Tell live and full pairs of blocks, in any of the rows of a batch.

    Lists of the rule are cut by blocks of queries: [n, B, G, 1, q, count].
    """
    box = Box(
        _along(_span(q, grid.queries, grid.block_q, grid.rows), -1),
        _along(_span(k, grid.keys, grid.block_k, grid.columns), -2),
    )
    found = grid.interval.bounds(box)
    if rule is not None:
        found = _meet(found, rule.bounds(box))
    if q.tags is not None and k.tags is not None:
        found = _meet(found, _by_tags(q.tags, k.tags))
    # Mask the padding behind the last key, which no rule knows of.
    whole = np.arange(grid.columns)[None] < grid.columns - (grid.pad_k > 0)
    return Live(found.some.any(0), found.every.all(0) & whole)


@lru_cache(maxsize=64)
def hides_nothing(rule: Rule, interval: Interval, queries: int, keys: int) -> bool:
    """Check whether blocks tell that a static rule over indices hides no pair that an interval shows."""
    q, k = (np.linspace(0, count - 1, min(count, SAMPLED)).astype(np.int32) for count in (queries, keys))
    pair = q[:, None], k[None]
    if not np.all(evaluate_apart(lambda: np.asarray(rule.sees(*pair))) | ~interval.sees(*pair)):
        return False
    size = max(LEAST_BLOCK, -(-max(queries, keys) // MOST_BLOCKS))
    tokens, grid = Tokens(None, None), Blocks(queries, keys, size, size, interval, by_index=True)
    shown = find_live(grid, None, tokens, tokens).some
    every = find_live(replace(grid, interval=Interval()), rule, tokens, tokens).full
    return bool(np.all(every | ~shown))


def _meet(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.some & b.some, a.every & b.every)


def _span(given: Tokens, length: int, size: int, blocks: int) -> Span:
    tokens: Any = np.minimum(np.arange(blocks * size, dtype=np.int32), length - 1).reshape(1, blocks, size)
    if given.positions is not None:
        tokens = jnp.moveaxis(given.positions, 0, 1)
        if given.tags is not None:
            # Count what is no token at the place of one: its position would make the block look longer than it is.
            there = jnp.moveaxis(given.tags, 0, 1) > 0
            first = jnp.take_along_axis(tokens, jnp.argmax(there, -1, keepdims=True), -1)
            tokens = jnp.where(there, tokens, first)
    return Span(tokens.min(-1), tokens.max(-1), tokens)


def _along(span: Span, axis: int) -> Span:
    """Give the blocks an axis for the other side's."""
    xp: Any = jnp if isinstance(span.least, jax.Array) else np
    return span._replace(least=xp.expand_dims(span.least, axis), most=xp.expand_dims(span.most, axis))


def _by_tags(q: Int[Array, "n B q"], k: Int[Array, "m B s"]) -> Bounds:
    """Tell pairs of blocks whose documents overlap, and those of one document without holes."""
    q, k = (jnp.moveaxis(tags, 0, 1) for tags in (q, k))
    most = np.iinfo(np.int32).max

    def ends(tags: Array) -> tuple[Array, Array]:
        return jnp.where(tags > 0, tags, most).min(-1), tags.max(-1)

    (q_low, q_high), (k_low, k_high) = ends(q), ends(k)
    some = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    alone = [(tags.min(-1) == tags.max(-1)) & (tags.min(-1) > 0) for tags in (q, k)]
    same = q_high[:, :, None] == k_high[:, None]
    return Bounds(some, same & alone[0][:, :, None] & alone[1][:, None])
