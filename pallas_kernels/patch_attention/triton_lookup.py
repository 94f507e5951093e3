"""Triton: bytes over the latest W patches; a program takes a head of a window of patches and walks over bytes.

Its own are the bytes whose latest patch is among the last of the window: all that they see is in it, so their softmax
is over one row of scores. In the backward pass the window reaches W - 1 patches further, to bytes that see its own
patches from there; these are looked at by two programs, and nothing is added atomically.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._hopper import varying_like
from pallas_kernels.patch_attention.triton_rows import (
    FLOOR,
    LOG2E,
    LOWEST,
    head_and_tile,
    launch,
    like,
    product,
    read,
    read_rows,
    scale,
    span,
    steps,
    write_rows,
)

NARROW, WIDE = 16, 32
"""Patches in a program's sight; the wide window is for gradients where a narrow one would leave it few of its own."""


def forward(
    q: Float[Array, "T H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H K"],
    latest: Int[Array, "N S"],
    valid: Bool[Array, "N M"],
    bias: Float[Array, "H W"],
    edges: Int[Array, "N edges"],
    *,
    interpret: bool,
) -> Float[Array, "T H K"]:
    """The output; `latest` and `valid` as `patch_attention.lookup` takes them, bias in fp32.

    The latest patch of byte s of block n is r or later where edges[n, r] <= s, if it sees any.
    """
    shape = _Shape(latest.shape[1], valid.shape[1], NARROW - bias.shape[1] + 1, NARROW, 32)
    arrays = (q, k, v, latest.reshape(-1), valid.reshape(-1), bias, edges.reshape(-1))
    programs, options = q.shape[1] * _tiles(valid, shape), {"warps": 1, "stages": 2, "interpret": interpret}
    return launch(
        partial(_forward, shape=shape), "patch_attention_lookup", programs, like(q), arrays, **options
    )


def backward(
    q: Float[Array, "T H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H K"],
    latest: Int[Array, "N S"],
    valid: Bool[Array, "N M"],
    bias: Float[Array, "H W"],
    edges: Int[Array, "N edges"],
    do: Float[Array, "T H K"],
    *,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """Gradients of q, k, v and the bias; the scores are made again."""
    before = bias.shape[1] - 1
    window, warps = (NARROW, 1) if 2 * before < NARROW // 2 else (WIDE, 2)
    shape = _Shape(latest.shape[1], valid.shape[1], window - 2 * before, window, 16)
    arrays = (q, k, v, do, latest.reshape(-1), valid.reshape(-1), bias, edges.reshape(-1))
    tiles, options = _tiles(valid, shape), {"warps": warps, "stages": 2, "interpret": interpret}
    out = [*(like(x) for x in (q, k, v)), varying_like(q, (tiles, *bias.shape), jnp.float32)]
    kernel, name = partial(_backward, shape=shape), "patch_attention_lookup_gradients"
    dq, dk, dv, dbias = launch(kernel, name, q.shape[1] * tiles, out, arrays, **options)
    return dq, dk, dv, jnp.sum(dbias, 0)


class _Shape(NamedTuple):
    """Of a block: bytes and keys. Of a program: its keys, those in its sight, and the bytes it looks at at a time."""

    size: int
    keys: int
    own: int
    window: int
    step: int


def _tiles(valid: Array, shape: _Shape) -> int:
    return len(valid) * -(-shape.keys // shape.own)


class _Tile:
    """One program's keys and values, and its bytes."""

    def __init__(self, refs: tuple[Any, ...], look_back: int, shape: _Shape) -> None:
        q, k, v, latest, valid, bias, edges = refs
        tiles = -(-shape.keys // shape.own)
        self.head, tile = head_and_tile(q.shape[1])
        self.tile, self.bias, self.latest = tile, bias, latest
        self.look_back, self.step = look_back, shape.step
        block, own = lax.div(tile, tiles), lax.rem(tile, tiles) * shape.own
        first = jnp.maximum(own - look_back + 1, 0)
        self.at, self.row = span(first, shape.window), block * shape.keys + first
        self.valid = read(valid, self.row, self.at < shape.keys)
        self.keys, self.values = (read_rows(x, self.row, self.head, self.valid) for x in (k, v))
        self.mine = (self.at >= own) & (self.at < own + shape.own) & (self.at < shape.keys)
        # The first byte that is its own, the first that is another's, the first that sees none of its keys.
        marks = (own, own + shape.own, own + shape.own + look_back - 1)
        at_edge = block * (shape.keys + 1)
        self.first, self.last, self.after = (edges[at_edge + jnp.minimum(i, shape.keys)] for i in marks)
        here = block * shape.size
        # Bytes that see nothing stand at a block's ends, and are written by its first and its last program.
        self.begin = jnp.where(own == 0, here, self.first)
        self.end = jnp.where(own + shape.own >= shape.keys, here + shape.size, self.last)

    def seen(self, i: Array, last: Array) -> tuple[Array, Array, Array]:
        """Where the step's bytes begin, which of them lie before `last` and may see something, their latest patch."""
        start = self.begin + i * self.step
        at = span(start, self.step)
        keep = (at >= self.first) & (at < last)
        return start, keep, jnp.where(keep, read(self.latest, start, keep), -1)

    def written(self, start: Array) -> Array:
        """Which of the step's bytes are this program's to write."""
        return span(start, self.step) < self.end

    def weights(self, queries: Array, latest: Array) -> tuple[Array, Array]:
        """exp(scores - their maximum) over the keys [step, window], and 1 / their sum."""
        back = latest[:, None] - self.at[None]
        seen = (back >= 0) & (back < self.look_back) & self.valid[None]
        bias = pltriton.load(self.bias.at[self.head, jnp.where(seen, back, 0)], mask=seen, other=0)
        scores = product(queries, self.keys.T) * queries.shape[1] ** -0.5 + bias
        scores = jnp.where(seen, scores * LOG2E, LOWEST)
        top = jnp.maximum(jnp.max(scores, axis=1), FLOOR)
        p = jnp.exp2(scores - top[:, None])
        total = jnp.sum(p, axis=1)
        return p, (1 / jnp.where(total > 0, total, 1.0))[:, None]


def _forward(*refs: Any, shape: _Shape) -> None:
    *given, o = refs
    q, bias = given[0], given[5]
    tile = _Tile(tuple(given), bias.shape[1], shape)

    def advance(i: Array, carry: Array) -> Array:
        start, keep, latest = tile.seen(i, tile.last)
        p, over_total = tile.weights(read_rows(q, start, tile.head, keep), latest)
        out = product(p.astype(q.dtype), tile.values) * over_total
        write_rows(o, start, tile.head, tile.written(start), out)
        return carry

    lax.fori_loop(0, steps(tile.begin, tile.end, shape.step), advance, jnp.int32(0))


def _backward(*refs: Any, shape: _Shape) -> None:
    q, k, v, do, latest, valid, bias, edges, dq, dk, dv, dbias = refs
    look_back = bias.shape[1]
    tile = _Tile((q, k, v, latest, valid, bias, edges), look_back, shape)

    def advance(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        dk_acc, dv_acc, sums = carry
        start, keep, latest = tile.seen(i, tile.after)
        queries, cotangents = (read_rows(x, start, tile.head, keep) for x in (q, do))
        p, over_total = tile.weights(queries, latest)
        p *= over_total
        dp = product(cotangents, tile.values.T)
        ds = (p * (dp - jnp.sum(p * dp, axis=1)[:, None])).astype(q.dtype)
        mine = span(start, shape.step) < tile.last
        hot = (latest[:, None] == tile.at[None]) & mine[:, None]
        own = tile.written(start)
        write_rows(dq, start, tile.head, own, product(ds, tile.keys) * scale(q))
        dv_acc += product(p.astype(q.dtype).T, cotangents)
        return dk_acc + product(ds.T, queries), dv_acc, sums + product(ds.T, hot.astype(q.dtype))

    zero = jnp.zeros((shape.window, q.shape[2]), jnp.float32)
    # ds of each key by the latest patch of the bytes, of which the bias's gradient is the sums of the diagonals.
    sums = jnp.zeros((shape.window, shape.window), jnp.float32)
    count = steps(tile.begin, jnp.maximum(tile.end, tile.after), shape.step)
    dk_acc, dv_acc, sums = lax.fori_loop(0, count, advance, (zero, zero, sums))
    write_rows(dk, tile.row, tile.head, tile.mine, dk_acc * scale(q))
    write_rows(dv, tile.row, tile.head, tile.mine, dv_acc)
    apart = tile.at[None] - tile.at[:, None]
    for i in range(look_back):
        dbias[tile.tile, tile.head, i] = jnp.sum(jnp.where(apart == i, sums, 0.0))
