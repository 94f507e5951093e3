"""Sums over runs of neighbouring bytes by gathers, without a scatter, and nothing is subtracted again.

A run is summed as its bytes up to the next multiple of TILE, and then as the sums of whole tiles. These are runs of
tiles: the same again, on 1/TILE of the data. What a tile adds up are its bytes of the run that its first byte is in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import count_below

TILE = 8

Values = Callable[[Callable[[Array], Array]], Array]
"""Makes the summands out of arrays over bytes, each passed through its argument, which picks some of their rows."""


class Runs(NamedTuple):
    """Disjoint runs among T bytes: those of run r are starts_r <= s < ends_r, and stops_s is the end of s's own run.

    A byte in no run has stops_s <= s. No run is longer than `longest`.
    """

    starts: Int[Array, "R"]
    ends: Int[Array, "R"]
    stops: Int[Array, "T"]
    longest: int


def find_runs(ids: Int[Array, "... S"], count: int) -> Runs:
    """Find runs of the ids 0 .. count - 1; other ids belong to no run.

    Ids do not fall within a block of S. Blocks are flattened: positions are among all of their bytes, and run r of
    block n is number n count + r.
    """
    size = ids.shape[-1]
    blocks = ids.reshape(-1, size)
    wanted = jnp.arange(count + 1, dtype=ids.dtype)
    find = jax.vmap(lambda row: count_below(row, wanted))
    edges = find(blocks) + size * jnp.arange(len(blocks), dtype=jnp.int32)[:, None]
    ends = jnp.take_along_axis(edges[:, 1:], jnp.clip(blocks, 0, count - 1), 1)
    stops = jnp.where((blocks >= 0) & (blocks < count), ends, 0)
    return Runs(edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1), stops.reshape(-1), size)


def reduce_runs(
    values: Values, runs: Runs, combine: Any = jnp.add, empty: float = 0.0
) -> Float[Array, "R ..."]:
    """Reduce each run by `combine`, a ufunc with the neutral value `empty`.

    A run without bytes gives `empty`. Bytes in no run are not read.
    """
    starts, ends, stops, longest = runs
    last = longest <= TILE
    stop = ends if last else jnp.minimum(ends, -(-starts // TILE) * TILE)
    found = jnp.asarray(empty, jnp.float32)
    for i in range(longest if last else TILE - 1):
        position = jnp.minimum(starts + i, len(stops) - 1)
        found = combine(found, _where(starts + i < stop, values(lambda x, at=position: x[at]), empty))
    if last:
        return found
    tiles, tile_stops = _tiles(values(lambda x: x), stops, combine, empty)
    every = jnp.arange(len(tile_stops), dtype=jnp.int32)
    coarse = Runs(every, tile_stops, tile_stops, -(-longest // TILE))
    rest = reduce_runs(lambda pick: pick(tiles), coarse, combine, empty)
    first = -(-starts // TILE)
    rest = rest[jnp.minimum(first, len(rest) - 1)]
    return combine(found, _where(first * TILE < ends, rest, empty))


def _tiles(
    x: Float[Array, "T ..."], stops: Int[Array, "T"], combine: Any, empty: float
) -> tuple[Float[Array, "tiles ..."], Int[Array, "tiles"]]:
    """Return what each tile holds of its first byte's run, and where that run stops, in tiles."""
    tail = -len(stops) % TILE
    x = jnp.pad(x, ((0, tail),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, TILE, *x.shape[1:])
    stops = jnp.pad(stops, (0, tail)).reshape(-1, TILE)[:, :1]
    inside = jnp.arange(x.shape[0] * TILE, dtype=jnp.int32).reshape(-1, TILE) < stops
    return combine.reduce(_where(inside, x, empty), axis=1), -(-stops[:, 0] // TILE)


def _where(keep: Bool[Array, "..."], x: Float[Array, "..."], otherwise: float) -> Float[Array, "..."]:
    return jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim)), x, otherwise)
