"""Triton: bytes over the latest W patches; a program takes a head of a window of patches and walks over bytes.

Its own are the bytes whose latest patch is among its own: all that they see is in the window, so their softmax is over
one row of scores. In the backward pass it goes on to the bytes that see its own patches from further on; these are
looked at by two programs, and nothing is added atomically. Where W leaves a window few patches of its own, it moves on
by half and so do the sums for its patches.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import FLOOR, LOG2E, LOWEST, exp2, launch, log2, product, span, steps
from pallas_kernels.patch_attention.triton_rows import head_and_tile, like, read, read_rows, scale, write_rows

WINDOW = 16
"""Patches in sight, the least that tensor cores take."""

STEP, STEP_BACK = 16, 16
"""Bytes that a program looks at at a time, forward and backward."""

STAGES, STAGES_BACK = 2, 3
"""Steps whose bytes are on their way at a time."""

STILL = 3
"""The farthest look back for which a backward program's window stays where it is."""

MOVES = 8
"""The number of times that the window of a backward program moves on otherwise."""

NEVER = 2**30
"""The place of a patch that is not to be seen."""


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
) -> tuple[Float[Array, "T H K"], Float[Array, "H T"]]:
    """Return the output, and log2 of the sum of 2^scores for `backward`.

    The scores are in units of ln 2. `latest` and `valid` are as `patch_attention.lookup` takes them, bias in fp32. The
    latest patch of byte s of block n is r or later where edges[n, r] <= s, if it sees any.
    """
    before = bias.shape[1] - 1
    shape = _Shape(latest.shape[1], valid.shape[1], WINDOW - before, before, WINDOW, STEP)
    arrays = (q, k, v, latest.reshape(-1), valid.reshape(-1), bias, edges.reshape(-1))
    out = (like(q), varying_like(q, q.shape[1::-1], jnp.float32))
    kernel, programs = partial(_forward, shape=shape, interpret=interpret), q.shape[1] * _tiles(valid, shape)
    options = {"warps": 1, "stages": STAGES, "interpret": interpret}
    return launch(kernel, "patch_attention_lookup", programs, out, arrays, **options)


def backward(
    q: Float[Array, "T H K"],
    k: Float[Array, "R H K"],
    v: Float[Array, "R H K"],
    latest: Int[Array, "N S"],
    valid: Bool[Array, "N M"],
    bias: Float[Array, "H W"],
    edges: Int[Array, "N edges"],
    sums: Float[Array, "H T"],
    do: Float[Array, "T H K"],
    *,
    interpret: bool,
) -> tuple[Array, Array, Array, Array]:
    """Return gradients of q, k, v and the bias.

    The scores are made again; `sums` are those of `forward`.
    """
    before = bias.shape[1] - 1
    half = WINDOW // 2
    own, reach, stride = (
        (WINDOW - 2 * before, before, WINDOW) if before < STILL else (MOVES * half, half, half)
    )
    shape = _Shape(latest.shape[1], valid.shape[1], own, reach, stride, STEP_BACK)
    arrays = (q, k, v, do, latest.reshape(-1), valid.reshape(-1), bias, edges.reshape(-1), sums)
    tiles, options = _tiles(valid, shape), {"warps": 1, "stages": STAGES_BACK, "interpret": interpret}
    out = [*(like(x) for x in (q, k, v)), varying_like(q, (tiles, *bias.shape), jnp.float32)]
    kernel, name = partial(_backward, shape=shape, interpret=interpret), "patch_attention_lookup_gradients"
    dq, dk, dv, dbias = launch(kernel, name, q.shape[1] * tiles, out, arrays, **options)
    return dq, dk, dv, jnp.sum(dbias, 0)


class _Shape(NamedTuple):
    """The sizes of a block and a program. A block has bytes and keys. A program has its own keys, the most keys before
    them that its window begins at, the step of its window, and the bytes looked at at a time.
    """

    size: int
    keys: int
    own: int
    reach: int
    stride: int
    step: int


def _tiles(valid: Array, shape: _Shape) -> int:
    return len(valid) * -(-shape.keys // shape.own)


class _Tile:
    """One program's part of a block: its keys [own, top) and its bytes."""

    def __init__(self, heads: int, edges: Any, look_back: int, shape: _Shape) -> None:
        tiles = -(-shape.keys // shape.own)
        self.head, self.number = head_and_tile(heads)
        self.shape, self.edges = shape, edges
        self.block, self.own = lax.div(self.number, tiles), lax.rem(self.number, tiles) * shape.own
        self.top = self.own + shape.own
        self.window = jnp.maximum(self.own - shape.reach, 0)
        # Find the first byte that is its own, the first that is another's, the first that sees none of its keys.
        self.first, self.last = self.edge(self.own), self.edge(self.top)
        self.after = self.edge(self.top + look_back - 1)
        here = self.block * shape.size
        # Write bytes that see nothing, at a block's ends, by its first and its last program.
        self.begin = jnp.where(self.own == 0, here, self.first)
        self.end = jnp.where(self.top >= shape.keys, here + shape.size, self.last)

    def edge(self, key: Array) -> Array:
        """Return the first byte whose latest key is this one or a later one."""
        return self.edges[self.block * (self.shape.keys + 1) + jnp.minimum(key, self.shape.keys)]

    def kept(self, start: Array, end: Array) -> Bool[Array, "step"]:
        """Mark the step's bytes before `end`, from the first that sees something on."""
        ahead = span(start - self.first, self.shape.step).astype(jnp.uint32)
        return ahead < jnp.maximum(end - self.first, 0).astype(jnp.uint32)


class _Sight:
    """The keys and values from `window` on."""

    def __init__(self, k: Any, v: Any, valid: Any, bias: Any, tile: _Tile, window: Array) -> None:
        at = span(window, WINDOW)
        self.bias, self.head = bias, tile.head
        self.row = tile.block * tile.shape.keys + window
        held = read(valid, self.row, at < tile.shape.keys)
        keys, self.values = (read_rows(x, self.row, tile.head, held) for x in (k, v))
        self.keys = (keys * scale(k)).astype(k.dtype)  # exact for heads of 64
        self.at = jnp.where(held, at, NEVER)
        self.below_top = jnp.where(at < tile.top, at, NEVER)
        # Find, in the backward pass, those that no later byte of this program sees.
        self.done = (at >= tile.own) & (
            at < jnp.minimum(jnp.minimum(tile.top, tile.shape.keys), window + tile.shape.stride)
        )

    def scores(self, queries: Array, latest: Array) -> Float[Array, "step keys"]:
        """Return scores in units of ln 2, LOWEST or less where a byte does not see a key."""
        back = latest[:, None] - self.at[None]
        seen = back.astype(jnp.uint32) < self.bias.shape[1]
        bias = pltriton.load(self.bias.at[self.head, back], mask=seen, other=LOWEST)
        return (product(queries, self.keys.T) + bias) * LOG2E


def _forward(
    q: Any,
    k: Any,
    v: Any,
    latest: Any,
    valid: Any,
    bias: Any,
    edges: Any,
    o: Any,
    sums: Any,
    *,
    shape: _Shape,
    interpret: bool,
) -> None:
    tile = _Tile(q.shape[1], edges, bias.shape[1], shape)
    sight = _Sight(k, v, valid, bias, tile, tile.window)

    def advance(i: Array, carry: Array) -> Array:
        start = tile.begin + i * shape.step
        keep, written = tile.kept(start, tile.last), span(start, shape.step) < tile.end
        scores = sight.scores(read_rows(q, start, tile.head, keep), read(latest, start, keep, other=-1))
        top = jnp.maximum(jnp.max(scores, axis=1), FLOOR)
        p = exp2(scores - top[:, None], interpret)
        total = jnp.sum(p, axis=1)
        total = jnp.where(total > 0, total, 1.0)
        p *= (1 / total)[:, None]
        write_rows(o, start, tile.head, written, product(p.astype(q.dtype), sight.values))
        here = sums.at[tile.head, pl.ds(start, shape.step)]
        pltriton.store(here, top + log2(total, interpret), mask=written)
        return carry

    lax.fori_loop(0, steps(tile.begin, tile.end, shape.step), advance, jnp.int32(0))


def _backward(*refs: Any, shape: _Shape, interpret: bool) -> None:
    q, k, v, do, latest, valid, bias, edges, sums, dq, dk, dv, dbias = refs
    tile = _Tile(q.shape[1], edges, bias.shape[1], shape)
    final = jnp.maximum(tile.end, tile.after)

    def walk(sight: _Sight, begin: Array, end: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Walk over the bytes [begin, end), whose keys are in sight.

        It writes dq and adds to the other gradients.
        """

        def advance(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            dk_acc, dv_acc, pairs = carry
            start = begin + i * shape.step
            keep = tile.kept(start, jnp.minimum(end, tile.after))
            newest = read(latest, start, keep, other=-1)
            queries, cotangents = (read_rows(x, start, tile.head, keep) for x in (q, do))
            sum_ = pltriton.load(sums.at[tile.head, pl.ds(start, shape.step)], mask=keep, other=0.0)
            p = exp2(sight.scores(queries, newest) - sum_[:, None], interpret)
            dp = product(cotangents, sight.values.T)
            ds = (p * (dp - jnp.sum(p * dp, axis=1)[:, None])).astype(q.dtype)
            written = span(start, shape.step) < jnp.minimum(end, tile.end)
            write_rows(dq, start, tile.head, written, product(ds, sight.keys))
            dv_acc += product(p.astype(q.dtype).T, cotangents)
            hot = jnp.where(newest[:, None] == sight.below_top[None], 1.0, 0.0).astype(q.dtype)
            return dk_acc + product(ds.T, queries), dv_acc, pairs + product(ds.T, hot)

        return lax.fori_loop(0, steps(begin, end, shape.step), advance, carry)

    def move(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Walk over the bytes of a window, then move to the next one."""
        window = tile.window + i * shape.stride
        sight = _Sight(k, v, valid, bias, tile, window)
        begin = jnp.where(i == 0, tile.begin, tile.edge(window + shape.stride))
        end = jnp.where(i == windows - 1, final, tile.edge(window + WINDOW))
        dk_acc, dv_acc, pairs = walk(sight, begin, end, carry)
        write_rows(dk, sight.row, tile.head, sight.done, dk_acc * scale(q))
        write_rows(dv, sight.row, tile.head, sight.done, dv_acc)
        return (dk_acc, dv_acc, pairs) if still else (_second_half(dk_acc), _second_half(dv_acc), pairs)

    still, windows = shape.stride == WINDOW, steps(tile.window, tile.top, shape.stride)
    zero = jnp.zeros((WINDOW, q.shape[2]), jnp.float32)
    # Sum ds of each key by the latest patch of the bytes: the diagonals' sums are the bias's gradient.
    carry = zero, zero, jnp.zeros((WINDOW, WINDOW), jnp.float32)
    *_, pairs = move(jnp.int32(0), carry) if still else lax.fori_loop(0, windows, move, carry)
    place = span(0, WINDOW)
    apart = place[None] - place[:, None]
    for i in range(bias.shape[1]):
        dbias[tile.number, tile.head, i] = jnp.sum(jnp.where(apart == i, pairs, 0.0))


def _second_half(x: Float[Array, "rows K"]) -> Float[Array, "rows K"]:
    """Return the second half of the rows, then zeros."""
    halves = x.reshape(2, -1, x.shape[1])
    second = (jnp.arange(2) == 1)[:, None, None]
    moved = jnp.sum(jnp.where(second, halves, 0.0), axis=0)
    return jnp.where(second, 0.0, moved[None]).reshape(x.shape)
