"""What the Triton kernels read of a mask: lists of live tiles, and the distinct tiles of which some pairs are hidden.

A rule is JAX code, which a Triton kernel cannot run. So the host tries it on every pair of a partial tile while the
program is traced. Many such tiles are equal, such as all those on the diagonal of a causal mask: each is kept once.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.rules import Interval, Rule
from pallas_kernels.attention.schedule import Live, Tokens, find_live

MOST_PAIRS = 1 << 23
"""Pairs of tiles that are told apart, live or not: 262,144 tokens in tiles of 128 by 64, 131,072 in 64 by 32."""

MOST_PARTIAL = 1 << 14
"""Partial tiles that the host tries pair by pair."""

MOST_DISTINCT = 1 << 10
"""Distinct ones, 8 to 16 MB of memory."""

HIDDEN, SHOWN = 0, 1
"""Numbers of the tile in which no pair is seen, and of that in which all are."""

_CHUNK = 256


class Tiles(NamedTuple):
    """Pairs of tiles as a static mask has them: exactly which are live and which are full.

    Attributes:
      live: bool [n, m], on the host.
      numbers: of the tile of the mask that a pair reads, int32 [n, m].
      seen: the tiles, int8 [count, block_q, block_k].
    """

    live: Live
    numbers: np.ndarray
    seen: np.ndarray

    def of_rows(self, rows: np.ndarray) -> "Tiles":
        """Return the pairs of some rows."""
        return Tiles(Live(*(x[rows] for x in self.live)), self.numbers[rows], self.seen)


class Lists(NamedTuple):
    """Live tiles by row; a row is a tile of queries, or of keys for their gradients.

    Attributes:
      rows: the rows, longest first.
      ends: of each of them the first full tile, the first partial one (each row has one), and the end.
      columns: tiles of the other side, and one number more.
      numbers: of the tile of the mask that a partial pair reads.
      seen: the tiles of the mask, a row's side first.
    """

    rows: Int[Array, "n"]
    ends: Int[Array, "n 3"]
    columns: Int[Array, "pairs_and_1"]
    numbers: Int[Array, "pairs"]
    seen: Int[Array, "count ROWS COLUMNS"]


def choose_lists(each: Sequence[Lists], device: Int[Array, ""]) -> Lists:
    """Return the lists of a device, known when the program runs; shorter ones get room behind their ends."""

    def choose(name: str) -> Array:
        parts = [getattr(lists, name) for lists in each]
        most = max(x.shape[-1] for x in parts)
        wide = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, most - x.shape[-1])]) for x in parts]
        return jnp.stack(wide)[device]

    return each[0]._replace(**{name: choose(name) for name in ("rows", "ends", "columns", "numbers")})


@lru_cache(maxsize=32)
def find_tiles(grid: Blocks, rule: Rule | None) -> Tiles | str:
    """Tell the tiles of a static mask over indices apart, or return why there are too many."""
    if grid.rows * grid.columns > MOST_PAIRS:
        return f"{grid.rows} x {grid.columns} pairs of tiles are more than {MOST_PAIRS}"
    some, full = (np.array(x) for x in find_live(grid, rule, Tokens(None, None), Tokens(None, None)))
    places = np.argwhere(some & ~full)
    if len(places) > MOST_PARTIAL:
        return f"{len(places)} pairs of tiles are partial, more than {MOST_PARTIAL}"
    numbers, shape = np.full(some.shape, SHOWN, np.int32), (grid.block_q, grid.block_k)
    known = {np.zeros(shape, np.int8).tobytes(): HIDDEN, np.ones(shape, np.int8).tobytes(): SHOWN}
    for start in range(0, len(places), _CHUNK):
        here = places[start : start + _CHUNK]
        for (i, j), tile in zip(here, _tried(grid, rule, here), strict=True):
            number = numbers[i, j] = known.setdefault(tile.tobytes(), len(known))
            some[i, j], full[i, j] = number != HIDDEN, number == SHOWN
        if len(known) > MOST_DISTINCT:
            return f"more than {MOST_DISTINCT} partial tiles differ from each other"
    seen = np.frombuffer(b"".join(known), np.int8).reshape(-1, *shape)
    return Tiles(Live(some, full), numbers, seen)


def _tried(grid: Blocks, rule: Rule | None, places: np.ndarray) -> np.ndarray:
    """Return which pairs of tokens see each other in some pairs of tiles: int8 [places, block_q, block_k]."""
    q = (places[:, :1] * grid.block_q + np.arange(grid.block_q)).astype(np.int32)[:, :, None]
    k = (places[:, 1:] * grid.block_k + np.arange(grid.block_k)).astype(np.int32)[:, None]
    with jax.ensure_compile_time_eval():
        seen = np.asarray(grid.interval.sees(q, k))
        if rule is not None:
            seen = seen & np.asarray(rule.sees(q, k))
    return np.broadcast_to(seen, (len(places), grid.block_q, grid.block_k)).astype(np.int8)


def make_lists(
    grid: Blocks,
    tiles: Tiles,
    q_tags: Int[Array, "T"] | None,
    k_tags: Int[Array, "S"] | None,
    *,
    transposed: bool = False,
) -> Lists:
    """Return the lists of a mask: made on the host or, given the tags of a row's queries and keys, on the device."""
    some, full = tiles.live
    if q_tags is not None and k_tags is not None:
        q, k = (
            Tokens(x.reshape(-1, 1, size), None)
            for x, size in ((q_tags, grid.block_q), (k_tags, grid.block_k))
        )
        own = replace(grid, queries=q_tags.size, keys=k_tags.size, interval=Interval())
        alike = find_live(own, None, q, k)
        some, full = some & alike.some, full & alike.full
    possible, numbers, seen = tiles.live.some, tiles.numbers, tiles.seen
    if transposed:
        some, full, possible, numbers = (x.T for x in (some, full, possible, numbers))
        seen = seen.transpose(0, 2, 1)
    # Order what the rule leaves of each row alone: on the device all pairs would take as long as a window's kernel.
    most = max(1, int(possible.sum(1).max()))
    columns = np.argsort(~possible, 1, kind="stable")[:, :most].astype(np.int32)
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    left = (xp.take_along_axis(xp.asarray(x), columns, 1) for x in (some, full, numbers))
    return _in_order(xp.asarray(columns), *_with_partial_ones(*left), seen)


def _in_order(columns: Any, some: Any, full: Any, numbers: Any, seen: np.ndarray) -> Lists:
    """Return the lists of rows [n, most]: full tiles, then partial ones; without room for others, if on the host."""
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    kinds = xp.where(full, 0, xp.where(some, 1, 2))
    order = xp.argsort(kinds, 1, stable=True)
    columns, numbers = (xp.take_along_axis(x, order, 1).reshape(-1) for x in (columns, numbers))
    counts, fulls = some.sum(1), (some & full).sum(1)
    first = xp.arange(len(some)) * some.shape[1]
    if xp is np:
        live = np.take_along_axis(some, order, 1).reshape(-1)
        columns, numbers, first = columns[live], numbers[live], np.cumsum(counts) - counts
    rows = xp.argsort(-counts, stable=True)
    ends = xp.stack([first, first + fulls, first + counts], 1)[rows]
    found = rows, ends, xp.pad(columns, (0, 1)), numbers, seen
    return Lists(*(jnp.asarray(x, x.dtype if x is seen else jnp.int32) for x in found))


def _with_partial_ones(some: Any, full: Any, numbers: Any) -> tuple[Any, Any, Any]:
    """Have each row a partial tile: a full one of its own by way of the mask, or a hidden one if there is none."""
    xp: Any = np if isinstance(some, np.ndarray) else jnp
    first = xp.arange(some.shape[1])[None] == xp.argmax(some, 1)[:, None]
    empty, bare = ~some.any(1, keepdims=True), ~(some & ~full).any(1, keepdims=True)
    return some | (first & empty), full & ~(first & bare), xp.where(first & empty, HIDDEN, numbers)
