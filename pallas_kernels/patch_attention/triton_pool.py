"""Triton: patches over their own bytes; a program takes a head of 16 patches of a block and walks over their bytes."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas_triton import FLOOR, LOG2E, LOWEST, launch, product, span, steps
from pallas_kernels.patch_attention.triton_rows import head_and_tile, like, read, read_rows, scale, write_rows

PATCHES = 16
"""Patches of a program, the least that tensor cores take: more would look at more bytes of others."""

STEP = 32
"""Bytes that it looks at at a time."""


def forward(
    q: Float[Array, "R H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H K"],
    edges: Int[Array, "N edges"],
    *,
    interpret: bool,
) -> Float[Array, "R H K"]:
    """Return the output.

    Patch p of block n has the bytes edges[n, p] <= s < edges[n, p + 1].
    """
    kernel = partial(_forward, slots=edges.shape[1] - 1, step=STEP)
    arrays, programs = (q, k, v, edges.reshape(-1)), _programs(q, edges)
    return launch(
        kernel, "patch_attention_pool", programs, like(q), arrays, warps=1, stages=3, interpret=interpret
    )


def backward(
    q: Float[Array, "R H K"],
    k: Float[Array, "T H K"],
    v: Float[Array, "T H K"],
    edges: Int[Array, "N edges"],
    do: Float[Array, "R H K"],
    *,
    interpret: bool,
) -> tuple[Array, Array, Array]:
    """Return gradients of q, k and v; the scores are made again."""
    kernel = partial(_backward, slots=edges.shape[1] - 1, size=len(k) // len(edges), step=STEP)
    arrays, programs = (q, k, v, do, edges.reshape(-1)), _programs(q, edges)
    out = [like(x) for x in (q, k, v)]
    return tuple(
        launch(
            kernel,
            "patch_attention_pool_gradients",
            programs,
            out,
            arrays,
            warps=1,
            stages=3,
            interpret=interpret,
        )
    )


def _programs(q: Array, edges: Array) -> int:
    return q.shape[1] * len(edges) * -(-(edges.shape[1] - 1) // PATCHES)


class _Tile:
    """Patches of one program, of one block: where they stand, and where the bytes of each begin and end."""

    def __init__(self, q: Any, edges: Any, slots: int) -> None:
        tiles = -(-slots // PATCHES)
        self.head, tile = head_and_tile(q.shape[1])
        self.block = lax.div(tile, tiles)
        first = lax.rem(tile, tiles) * PATCHES
        self.is_last = lax.rem(tile, tiles) == tiles - 1
        self.inside = span(first, PATCHES) < slots
        self.row = self.block * slots + first
        at = self.block * (slots + 1) + first
        self.starts, self.ends = read(edges, at, self.inside), read(edges, at + 1, self.inside)
        self.begin, self.end = edges[at], edges[at + jnp.minimum(slots - first, PATCHES)]

    def rows(self, ref: Any) -> Array:
        """Read rows of an array over patches; 0 for those without bytes."""
        return read_rows(ref, self.row, self.head, self.starts < self.ends)

    def scores(self, queries: Array, keys: Array, start: Array) -> Float[Array, "patches bytes"]:
        """Return scores in units of log 2."""
        at = span(start, keys.shape[0])
        own = (at[None] >= self.starts[:, None]) & (at[None] < self.ends[:, None])
        return jnp.where(own, product(queries, keys.T) * (keys.shape[1] ** -0.5 * LOG2E), LOWEST)


def _forward(q: Any, k: Any, v: Any, edges: Any, o: Any, *, slots: int, step: int) -> None:
    tile = _Tile(q, edges, slots)
    queries = tile.rows(q)

    def advance(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        start = tile.begin + i * step
        keep = span(start, step) < tile.end
        keys, values = (read_rows(x, start, tile.head, keep) for x in (k, v))
        scores = tile.scores(queries, keys, start)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(top - higher), jnp.exp2(scores - higher[:, None])
        acc = acc * shrink[:, None] + product(p.astype(q.dtype), values)
        return acc, higher, total * shrink + jnp.sum(p, axis=1)

    zero = jnp.zeros(PATCHES, jnp.float32)
    start = (jnp.zeros((PATCHES, q.shape[2]), jnp.float32), zero + FLOOR, zero)
    acc, _, total = lax.fori_loop(0, steps(tile.begin, tile.end, step), advance, start)
    o_rows = acc / jnp.where(total > 0, total, 1.0)[:, None]
    write_rows(o, tile.row, tile.head, tile.inside, o_rows)


def _backward(*refs: Any, slots: int, size: int, step: int) -> None:
    """Walk twice: for log-sum-exp and delta = sum p dp of each patch, then for gradients."""
    q, k, v, do, edges, dq, dk, dv = refs
    tile = _Tile(q, edges, slots)
    queries, cotangents = tile.rows(q), tile.rows(do)

    def look(i: Array) -> tuple[Array, Array, Array, Array]:
        start = tile.begin + i * step
        keep = span(start, step) < tile.end
        keys, values = (read_rows(x, start, tile.head, keep) for x in (k, v))
        return start, keys, tile.scores(queries, keys, start), product(cotangents, values.T)

    def add_up(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, delta = carry
        _, _, scores, dp = look(i)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink, p = jnp.exp2(top - higher), jnp.exp2(scores - higher[:, None])
        return higher, total * shrink + jnp.sum(p, axis=1), delta * shrink + jnp.sum(p * dp, axis=1)

    zero = jnp.zeros(PATCHES, jnp.float32)
    count = steps(tile.begin, tile.end, step)
    top, total, delta = lax.fori_loop(0, count, add_up, (zero + FLOOR, zero, zero))
    total = jnp.where(total > 0, total, 1.0)
    lse, delta = top + jnp.log2(total), delta / total
    # Leave the padding after a block's last patch to the last program.
    end = jnp.where(tile.is_last, (tile.block + 1) * size, tile.end)

    def advance(i: Array, acc: Array) -> Array:
        start, keys, scores, dp = look(i)
        p = jnp.exp2(scores - lse[:, None])
        ds = (p * (dp - delta[:, None])).astype(q.dtype)
        own = span(start, step) < end
        write_rows(dv, start, tile.head, own, product(p.astype(q.dtype).T, cotangents))
        write_rows(dk, start, tile.head, own, product(ds.T, queries) * scale(q))
        return acc + product(ds, keys)

    acc = jnp.zeros((PATCHES, q.shape[2]), jnp.float32)
    acc = lax.fori_loop(0, steps(tile.begin, end, step), advance, acc)
    write_rows(dq, tile.row, tile.head, tile.inside, acc * scale(q))
