"""Block-sparse attention and its gradients in Triton's language; imported where they run, as many machines lack Triton.

A program owns a tile of queries (`attend`, `queries_gradient`) or of keys (`keys_gradient`). It walks the list of tiles
of the other side that meet it: partial ones, which read the mask, then full ones. With c = scale / log 2, and
l = lse / log 2, which is `level`,

    p = 2^(c q.k - l),  ds = p (do.v - delta),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do.

No program adds to memory that another one writes, so results repeat bit for bit. q, o and their gradients are
[B, T, H, K], k, v and theirs [B, S, G, K], tags [B, T] and [B, S], lse, level and delta [B, H, T] in fp32.
`triton_lists.Lists` says what is in the other arrays.

No annotation is checked here: Triton compiles the source of these functions and never calls them.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2 = tl.constexpr(0.6931471805599453)
EMPTY = tl.constexpr(-1e30)
"""Log-sum-exp of a query that sees no key, as `EMPTY_LSE`."""
FLOOR = tl.constexpr(-5e29)
"""Least number that is taken off a score: finite, so that 2^(hidden score - it) is 0, not NaN."""


@triton.jit
@no_type_check
def pointers(x, first, head, HEADS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Return where SIZE tokens of a head lie, from `first` on: [SIZE, WIDTH]."""
    x += (first.to(tl.int64) * HEADS + head) * WIDTH
    return x + tl.arange(0, SIZE)[:, None] * (HEADS * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
@no_type_check
def hide(x, other, seen, number, own, tags, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TAGS: tl.constexpr):
    """Return x [ROWS, COLUMNS], but `other` where tile `number` of the mask is 0 or tags differ."""
    tile = seen + number.to(tl.int64) * (ROWS * COLUMNS)
    found = tl.load(tile + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]) != 0
    if TAGS:
        found &= own[:, None] == tl.load(tags + tl.arange(0, COLUMNS))[None, :]
    return tl.where(found, x, other)


@triton.jit
@no_type_check
def own_lists(
    rows, ends, columns, numbers, batch, COUNT: tl.constexpr, PAIRS: tl.constexpr, TAGS: tl.constexpr
):
    """Return the lists of a row of the batch, which are those of all rows unless these are packed."""
    if TAGS:
        rows += batch * COUNT
        ends += batch * (3 * COUNT)
        columns += batch * (PAIRS + 1)
        numbers += batch * PAIRS
    return rows, ends, columns, numbers


@triton.jit
@no_type_check
def bounds(ends, turn, FULL: tl.constexpr):
    """Return where the list of a row's partial tiles, or of its full ones, begins and ends."""
    first = tl.load(ends + 3 * turn + 1 - FULL)
    last = tl.load(ends + 3 * turn + 2 - FULL)
    # Keep the compiler from a way round the first loop: with one, ptxas waits after every single product.
    if not FULL:
        tl.assume(first < last)
    return first, last


@triton.jit
@no_type_check
def is_empty(ends, numbers, turn):
    """Return whether no tile meets a row, whose list has a hidden one all the same."""
    return tl.load(numbers + tl.load(ends + 3 * turn + 1)) == 0


@triton.jit
@no_type_check
def attend(
    q,
    k,
    v,
    q_tags,
    k_tags,
    rows,
    ends,
    columns,
    numbers,
    seen,
    o,
    lse,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Write o and lse of ROWS queries of one head."""
    turn, line = tl.program_id(0) % (T // ROWS), tl.program_id(0) // (T // ROWS)
    batch, head = line // HEADS, line % HEADS
    group = head // (HEADS // GROUPS)
    rows, ends, columns, numbers = own_lists(rows, ends, columns, numbers, batch, T // ROWS, PAIRS, TAGS)
    row = tl.load(rows + turn)
    place = batch * T + row * ROWS
    queries = tl.load(pointers(q, place, head, HEADS, WIDTH, ROWS))
    tag = tl.load(q_tags + place + tl.arange(0, ROWS)) if TAGS else 0
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), FLOOR, tl.float32)
    for full in tl.static_range(2):
        first, last = bounds(ends, turn, full)
        column = tl.load(columns + first)
        for i in range(first, last):
            at = batch * S + column * COLUMNS
            scores = tl.dot(queries, tl.trans(tl.load(pointers(k, at, group, GROUPS, WIDTH, COLUMNS))))
            if not full:
                number = tl.load(numbers + i)
                scores = hide(scores, -float("inf"), seen, number, tag, k_tags + at, ROWS, COLUMNS, TAGS)
            higher = tl.maximum(top, tl.max(scores, 1) * (SCALE / LOG2))
            p = tl.exp2(scores * (SCALE / LOG2) - higher[:, None])
            keep = tl.exp2(top - higher)
            total = total * keep + tl.sum(p, 1)
            values = tl.load(pointers(v, at, group, GROUPS, WIDTH, COLUMNS))
            acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None])
            top = higher
            column = tl.load(columns + i + 1)
    some = total > 0
    total = tl.where(some, total, 1.0)
    result = tl.where(some[:, None], acc / total[:, None], 0.0)
    tl.store(pointers(o, place, head, HEADS, WIDTH, ROWS), result.to(o.dtype.element_ty))
    where = line.to(tl.int64) * T + row * ROWS + tl.arange(0, ROWS)
    tl.store(lse + where, tl.where(some, (top + tl.log2(total)) * LOG2, EMPTY))


@triton.jit
@no_type_check
def queries_gradient(
    q,
    k,
    v,
    do,
    level,
    delta,
    q_tags,
    k_tags,
    rows,
    ends,
    columns,
    numbers,
    seen,
    dq,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Write dq of ROWS queries of one head."""
    turn, line = tl.program_id(0) % (T // ROWS), tl.program_id(0) // (T // ROWS)
    batch, head = line // HEADS, line % HEADS
    group = head // (HEADS // GROUPS)
    rows, ends, columns, numbers = own_lists(rows, ends, columns, numbers, batch, T // ROWS, PAIRS, TAGS)
    row = tl.load(rows + turn)
    place = batch * T + row * ROWS
    queries = tl.load(pointers(q, place, head, HEADS, WIDTH, ROWS))
    cotangent = tl.load(pointers(do, place, head, HEADS, WIDTH, ROWS))
    where = line.to(tl.int64) * T + row * ROWS + tl.arange(0, ROWS)
    own_level, own_delta = tl.load(level + where), tl.load(delta + where)
    tag = tl.load(q_tags + place + tl.arange(0, ROWS)) if TAGS else 0
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for full in tl.static_range(2):
        first, last = bounds(ends, turn, full)
        column = tl.load(columns + first)
        for i in range(first, last):
            at = batch * S + column * COLUMNS
            keys = tl.load(pointers(k, at, group, GROUPS, WIDTH, COLUMNS))
            values = tl.load(pointers(v, at, group, GROUPS, WIDTH, COLUMNS))
            p = tl.exp2(tl.dot(queries, tl.trans(keys)) * (SCALE / LOG2) - own_level[:, None])
            if not full:
                number = tl.load(numbers + i)
                p = hide(p, 0.0, seen, number, tag, k_tags + at, ROWS, COLUMNS, TAGS)
            ds = p * (tl.dot(cotangent, tl.trans(values)) - own_delta[:, None])
            acc = tl.dot(ds.to(keys.dtype), keys, acc)
            column = tl.load(columns + i + 1)
    result = tl.where(is_empty(ends, numbers, turn), 0.0, acc * SCALE)
    tl.store(pointers(dq, place, head, HEADS, WIDTH, ROWS), result.to(dq.dtype.element_ty))


@triton.jit
@no_type_check
def keys_gradient(
    q,
    k,
    v,
    do,
    level,
    delta,
    q_tags,
    k_tags,
    rows,
    ends,
    columns,
    numbers,
    seen,
    dk,
    dv,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Write dk and dv of ROWS keys of one head of keys, summed over its heads of queries."""
    turn, line = tl.program_id(0) % (S // ROWS), tl.program_id(0) // (S // ROWS)
    batch, group = line // GROUPS, line % GROUPS
    rows, ends, columns, numbers = own_lists(rows, ends, columns, numbers, batch, S // ROWS, PAIRS, TAGS)
    row = tl.load(rows + turn)
    place = batch * S + row * ROWS
    keys = tl.load(pointers(k, place, group, GROUPS, WIDTH, ROWS))
    values = tl.load(pointers(v, place, group, GROUPS, WIDTH, ROWS))
    tag = tl.load(k_tags + place + tl.arange(0, ROWS)) if TAGS else 0
    to_keys = tl.zeros((ROWS, WIDTH), tl.float32)
    to_values = tl.zeros((ROWS, WIDTH), tl.float32)
    for member in range(HEADS // GROUPS):
        head = group * (HEADS // GROUPS) + member
        where = (batch * HEADS + head).to(tl.int64) * T + tl.arange(0, COLUMNS)
        for full in tl.static_range(2):
            first, last = bounds(ends, turn, full)
            column = tl.load(columns + first)
            for i in range(first, last):
                at = batch * T + column * COLUMNS
                queries = tl.load(pointers(q, at, head, HEADS, WIDTH, COLUMNS))
                cotangent = tl.load(pointers(do, at, head, HEADS, WIDTH, COLUMNS))
                own_level = tl.load(level + where + column * COLUMNS)
                own_delta = tl.load(delta + where + column * COLUMNS)
                p = tl.exp2(tl.dot(keys, tl.trans(queries)) * (SCALE / LOG2) - own_level[None, :])
                if not full:
                    number = tl.load(numbers + i)
                    p = hide(p, 0.0, seen, number, tag, q_tags + at, ROWS, COLUMNS, TAGS)
                to_values = tl.dot(p.to(cotangent.dtype), cotangent, to_values)
                ds = p * (tl.dot(values, tl.trans(cotangent)) - own_delta[None, :])
                to_keys = tl.dot(ds.to(queries.dtype), queries, to_keys)
                column = tl.load(columns + i + 1)
    nothing = is_empty(ends, numbers, turn)
    to_values = tl.where(nothing, 0.0, to_values)
    to_keys = tl.where(nothing, 0.0, to_keys * SCALE)
    tl.store(pointers(dv, place, group, GROUPS, WIDTH, ROWS), to_values.to(dv.dtype.element_ty))
    tl.store(pointers(dk, place, group, GROUPS, WIDTH, ROWS), to_keys.to(dk.dtype.element_ty))
