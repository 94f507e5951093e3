"""Triton: one new token a row is rotated, written to the cache in place, and attends to a prefix that is cut in parts.

A program takes one part of a row's filled slots and one key head, with all queries that share it. It rotates the
queries itself. The first part's program also attends to the token's own key, which it has in registers, and writes key
and value. No program reads the slot that is written, so none waits for another. Parts are as long as the row's own
prefix asks: a row gets the same bits whatever other rows hold.

Source: Dao et al., Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import varying_like
from pallas_kernels._pallas_triton import FLOOR, LOG2E, LOWEST, exp2, launch, log2, product, span, steps
from pallas_kernels.attention.masks import EMPTY_LSE
from pallas_kernels.attention.token_parts import EMPTY, STEP, TURN, count_parts, oldest

LEAST_ROWS = 16
"""Rows of the smallest matrix product."""

CLEARED = 128
"""Times that a program clears at a time."""

WARPS, STAGES = 4, 3
"""Warps of a program, and steps whose slots are on their way at a time."""


class _Shape(NamedTuple):
    """Sizes and options of a launch: key heads, queries that share one, and parts of a prefix."""

    groups: int
    together: int
    parts: int
    dtype: Any
    window: int | None
    scale: float
    interpret: bool


class _Token(NamedTuple):
    """What a program knows of its token."""

    row: Any
    group: Any
    part: Any
    position: Any
    now: Any
    slot: Any
    kept: Any
    fresh: Any


def token_attention(
    heads: Float[Array, "P B N"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    times: Int[Array, "B S"],
    marks: Int[Array, "B 4"],
    frequencies: UInt32[Array, "F"] | None = None,
    *,
    dtype: Any,
    window: int | None,
    scale: float,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Compute `token_attention`; what `token.why_not` refuses is not checked again.

    Args:
      interpret: run on the CPU, for tests.
    """
    turns = () if frequencies is None else (jnp.concatenate([frequencies] * 2).astype(jnp.int32),)
    given = vary_alike(heads, k, v, times, marks, *turns)
    rows, slots, groups, width = k.shape
    count, parts = heads.shape[2] // width - 2 * groups, count_parts(rows * groups, slots)
    shape = _Shape(groups, count // groups, parts, jnp.dtype(dtype), window, scale * LOG2E, interpret)
    sizes = (parts, rows, groups, count // groups)
    out = [varying_like(k, (*sizes, width), jnp.float32), varying_like(k, sizes, jnp.float32)]
    out += [varying_like(k, z.shape, z.dtype) for z in (k, v, times)]
    options = {"stages": STAGES, "warps": WARPS, "interpret": interpret, "aliases": {1: 2, 2: 3, 3: 4}}
    run = partial(_attend, shape=shape)
    o, lse, *cache = launch(run, "token_attention", rows * parts * groups, out, given, **options)
    return o.reshape(parts, rows, count, width), lse.reshape(parts, rows, count), *cache


def _attend(heads: Any, k: Any, v: Any, times: Any, marks: Any, *rest: Any, shape: _Shape) -> None:
    """Attend to a part; the first one writes the token."""
    turns, (o, lse, *cache) = (rest[0] if len(rest) == 6 else None), rest[-5:]
    token = _read_marks(marks, k.shape[1], shape)
    size, width = max(LEAST_ROWS, pl.next_power_of_2(shape.together)), k.shape[3]
    here, chan = span(0, size), span(0, width)
    head = partial(_read_head, heads, turns, token, shape)
    q = head((token.group * shape.together + here)[:, None], chan[None], (here < shape.together)[:, None])
    key = shape.groups * shape.together + token.group
    own_k, own_v = head(key, chan), head(key + shape.groups, chan, turned=False)

    @pl.when((token.part == 0) & token.kept)
    def _() -> None:
        for ref, values in zip(cache[:2], (own_k, own_v), strict=True):
            pltriton.store(ref.at[token.row, token.slot, token.group, :], values.astype(ref.dtype))

    _write_times(cache[2], token, shape)
    top, total, acc = _begin(token, q, own_k.astype(k.dtype), own_v.astype(v.dtype), shape)
    top, total, acc = _add_slots(token, (k, v, times), q.astype(shape.dtype), (top, total, acc), shape)
    found, real = total > 0, here < shape.together
    total = jnp.where(found, total, 1.0)
    sums = jnp.where(found, (top + log2(total, shape.interpret)) / LOG2E, EMPTY_LSE)
    own = token.part, token.row, token.group, pl.ds(0, size)
    pltriton.store(o.at[*own, :], acc * (1 / total)[:, None], mask=real[:, None])
    pltriton.store(lse.at[own], sums, mask=real)


def _read_marks(marks: Any, slots: int, shape: _Shape) -> _Token:
    program = pl.program_id(0)
    # Keep the heads of a part neighbours, so that they read whole rows together.
    group, other = lax.rem(program, shape.groups), lax.div(program, shape.groups)
    part, row = lax.rem(other, shape.parts), lax.div(other, shape.parts)
    position, now, kept, fresh = (marks[row, i] for i in range(4))
    return _Token(row, group, part, position, now, lax.rem(now, slots), kept > 0, fresh > 0)


def _read_head(
    heads: Any,
    turns: Any,
    token: _Token,
    shape: _Shape,
    head: Any,
    chan: Any,
    mask: Any = None,
    turned: bool = True,
) -> Array:
    """Return heads in fp32, each step rounded to `dtype`, turned by the token's position."""
    width = chan.size

    def add(chan: Any) -> Array:
        at, masked = head * width + chan, {} if mask is None else {"mask": None, "other": 0}
        if mask is not None:
            masked["mask"] = jnp.broadcast_to(mask, at.shape)
        y = jnp.zeros(at.shape, jnp.float32)
        for i in range(heads.shape[0]):
            y += pltriton.load(heads.at[i, token.row, at], **masked).astype(jnp.float32)
        return y.astype(shape.dtype).astype(jnp.float32)

    if turns is None or not turned:
        return add(chan)
    whole = span(0, width)
    angles = (turns[:] * token.position).astype(jnp.float32) * TURN
    cos, sin = jnp.cos(angles), jnp.where(whole < width // 2, -jnp.sin(angles), jnp.sin(angles))
    x, other = add(chan), add(lax.rem(chan + width // 2, width))
    if x.ndim == 2:
        cos, sin = cos[None], sin[None]
    return (x * cos + other * sin).astype(shape.dtype).astype(jnp.float32)


def _write_times(times: Any, token: _Token, shape: _Shape) -> None:
    """Write the time of a slot, or of all slots where a new document begins."""
    slots, first = times.shape[1], token.group == 0

    @pl.when(first & (token.part == 0) & token.kept & ~token.fresh)
    def _() -> None:
        times[token.row, token.slot] = token.now

    @pl.when(first & token.fresh)
    def _() -> None:
        each = -(-slots // shape.parts)
        begin, end = token.part * each, jnp.minimum((token.part + 1) * each, slots)

        def clear(i: Any, _: Any) -> None:
            at = span(begin + i * CLEARED, CLEARED)
            values = jnp.where((at == token.slot) & token.kept, token.now, EMPTY)
            pltriton.store(times.at[token.row, pl.ds(begin + i * CLEARED, CLEARED)], values, mask=at < end)

        lax.fori_loop(0, -(-each // CLEARED), clear, None)


def _begin(token: _Token, q: Array, k: Array, v: Array, shape: _Shape) -> tuple[Array, Array, Array]:
    """Return what the first part has seen at its begin: the token itself."""
    k, v = (x.astype(shape.dtype).astype(jnp.float32) for x in (k, v))
    size, is_own = len(q), (token.part == 0) & token.kept
    scores = jnp.sum(q * k[None], axis=1) * shape.scale
    top = jnp.where(is_own, scores, FLOOR)
    total = jnp.where(is_own, jnp.ones(size, jnp.float32), 0.0)
    return top, total, jnp.where(is_own, jnp.broadcast_to(v[None], q.shape), 0.0)


def _add_slots(token: _Token, cache: Any, q: Array, carry: Any, shape: _Shape) -> tuple[Array, Array, Array]:
    """Add the slots of a part, but for the token's own."""
    k, v, times = cache
    filled = jnp.where(token.kept & ~token.fresh, jnp.minimum(token.now + 1, k.shape[1]), 0)
    length = steps(0, filled, shape.parts * STEP) * STEP
    begin = token.part * length
    stop = jnp.minimum(begin + length, filled)
    behind = oldest(token.now, shape.window)

    def advance(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        start = begin + i * STEP
        at = span(start, STEP)
        inside = (at < stop) & (at != token.slot)
        keys, values = (
            pltriton.load(x.at[token.row, pl.ds(start, STEP), token.group, :], mask=inside[:, None], other=0)
            for x in (k, v)
        )
        seen = pltriton.load(times.at[token.row, pl.ds(start, STEP)], mask=inside, other=EMPTY) > behind
        scores = jnp.where(seen[None], product(q, keys.astype(q.dtype).T) * shape.scale, LOWEST)
        highest = jnp.maximum(top, jnp.max(scores, axis=1))
        p, kept = exp2(scores - highest[:, None], shape.interpret), exp2(top - highest, shape.interpret)
        added = product(p.astype(q.dtype), values.astype(q.dtype))
        return highest, total * kept + jnp.sum(p, axis=1), acc * kept[:, None] + added

    return lax.fori_loop(0, steps(begin, stop, STEP), advance, carry)
