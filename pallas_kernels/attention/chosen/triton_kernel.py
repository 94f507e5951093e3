"""Attention to chosen blocks and its gradients in Triton's language; imported where they run, as many machines lack it.

A program owns a block of keys of one head. It walks the tokens whose lists name the block, `TOKENS` at a time with all
query heads that share the keys: a tile of a product holds no pair that is not asked for. Each (token, block) has a
place of its own in what is written, [B, T, COUNT, H, K]; what a token found in its blocks is merged afterwards.
`PARTS` programs share a block, and dk and dv have a place for each. No program adds to memory that another one writes.

With c = scale / log 2, l = lse / log 2, which is `level`,

    p = 2^(c q.k - l),  ds = p (do.v - delta),  dq = scale ds k,  dk = scale ds^T q,  dv = p^T do.

q, do are [B, T, H, K], k, v [B, S, G, K], tags [B, T] and [B, S], level and delta [B, T, H] in fp32.
`triton_gpu.Work` says what is in the other arrays. `block_shares` and `largest` choose blocks for `select_triton`.
No annotation is checked here: Triton compiles the source.
"""

from typing import no_type_check

import triton
import triton.language as tl

LOG2 = tl.constexpr(0.6931471805599453)
EMPTY = tl.constexpr(-1e30)
"""Log-sum-exp of a query that sees no key of a block, as `EMPTY_LSE`."""
FLOOR = tl.constexpr(-5e29)
"""Least number that is taken off a score: finite, so that 2^(hidden score - it) is 0, not NaN."""


@triton.jit
@no_type_check
def find_work(
    rows,
    starts,
    T: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return this program's row of the batch, key head, part, block, and the ends of its tokens in `order`."""
    part, line = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    turn, line = line % BLOCKS, line // BLOCKS
    batch, group = line // GROUPS, line % GROUPS
    lists = batch * LISTS + group % LISTS
    block = tl.load(rows + lists * BLOCKS + turn)
    first = tl.load(starts + lists * (BLOCKS + 1) + block)
    last = tl.load(starts + lists * (BLOCKS + 1) + block + 1)
    # Count on from the pairs of the lists before.
    return batch, group, part, block, first + lists * (T * COUNT), last + lists * (T * COUNT)


@triton.jit
@no_type_check
def key_pointers(
    x, batch, group, block, S: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Return where the keys of a block lie, [BLOCK, WIDTH]; the last key stands for those behind it."""
    place = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), S - 1)
    place = ((batch * S + place).to(tl.int64) * GROUPS + group) * WIDTH
    return x + place[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
@no_type_check
def see(
    token,
    batch,
    block,
    offset,
    q_tags,
    k_tags,
    T: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    INTERVAL: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Return whether tokens [1, n] see the keys of a block [BLOCK, 1]."""
    key = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    found = key < S
    if INTERVAL:
        distance = token + tl.load(offset + batch) - key
        found = found & (distance <= BEFORE) & (distance >= -AFTER)
    if TAGS:
        other = tl.load(k_tags + batch * S + tl.minimum(key, S - 1))
        found = found & (tl.load(q_tags + batch * T + token) == other)
    return found


@triton.jit
@no_type_check
def attend_chosen(
    q,
    k,
    v,
    q_tags,
    k_tags,
    rows,
    starts,
    order,
    offset,
    o,
    lse,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    INTERVAL: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Write o and lse / log 2 of the tokens of a block."""
    batch, group, part, block, first, last = find_work(rows, starts, T, GROUPS, LISTS, BLOCKS, COUNT, PARTS)
    SHARE: tl.constexpr = HEADS // GROUPS
    keys = tl.load(key_pointers(k, batch, group, block, S, GROUPS, WIDTH, BLOCK))
    values = tl.load(key_pointers(v, batch, group, block, S, GROUPS, WIDTH, BLOCK))
    member = tl.arange(0, TOKENS * SHARE)
    head = group * SHARE + member % SHARE
    for i in range(first + part * TOKENS, last, PARTS * TOKENS):
        here = i + member // SHARE
        pair = tl.load(order + tl.minimum(here, last - 1))
        token = pair // COUNT
        place = (batch * T + token).to(tl.int64) * HEADS + head
        queries = tl.load(q + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        scores = tl.dot(queries, tl.trans(keys)) * (SCALE / LOG2)
        if INTERVAL or TAGS or S % BLOCK:
            seen = see(
                token[None, :],
                batch,
                block,
                offset,
                q_tags,
                k_tags,
                T,
                S,
                BLOCK,
                BEFORE,
                AFTER,
                INTERVAL,
                TAGS,
            )
            scores = tl.where(tl.trans(seen), scores, -float("inf"))
        top = tl.maximum(tl.max(scores, 1), FLOOR)
        p = tl.exp2(scores - top[:, None])
        total = tl.sum(p, 1)
        some = total > 0
        total = tl.where(some, total, 1.0)
        result = tl.dot(p.to(values.dtype), values) / total[:, None]
        slot = (batch.to(tl.int64) * (T * COUNT) + pair) * HEADS + head
        live = here < last
        to = o + slot[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(to, result.to(o.dtype.element_ty), mask=live[:, None])
        tl.store(lse + slot, tl.where(some, top + tl.log2(total), EMPTY), mask=live)


@triton.jit
@no_type_check
def chosen_gradients(
    q,
    k,
    v,
    do,
    level,
    delta,
    q_tags,
    k_tags,
    rows,
    starts,
    order,
    offset,
    dq,
    dk,
    dv,
    T: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    INTERVAL: tl.constexpr,
    TAGS: tl.constexpr,
):
    """Write what a block adds to dq of its tokens, and a part of its dk and dv: [B, PARTS, BLOCKS * BLOCK, G, K]."""
    batch, group, part, block, first, last = find_work(rows, starts, T, GROUPS, LISTS, BLOCKS, COUNT, PARTS)
    SHARE: tl.constexpr = HEADS // GROUPS
    keys = tl.load(key_pointers(k, batch, group, block, S, GROUPS, WIDTH, BLOCK))
    values = tl.load(key_pointers(v, batch, group, block, S, GROUPS, WIDTH, BLOCK))
    to_keys = tl.zeros((BLOCK, WIDTH), tl.float32)
    to_values = tl.zeros((BLOCK, WIDTH), tl.float32)
    member = tl.arange(0, TOKENS * SHARE)
    head = group * SHARE + member % SHARE
    start = first + part * TOKENS
    # Walk once where there is nothing to do: with a way round the loop, ptxas waits after every single product.
    for i in range(start, tl.maximum(last, start + 1), PARTS * TOKENS):
        here = i + member // SHARE
        pair = tl.load(order + tl.maximum(tl.minimum(here, last - 1), 0))
        token = pair // COUNT
        place = (batch * T + token).to(tl.int64) * HEADS + head
        queries = tl.load(q + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        cotangent = tl.load(do + place[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
        own_level, own_delta = tl.load(level + place), tl.load(delta + place)
        p = tl.exp2(tl.dot(keys, tl.trans(queries)) * (SCALE / LOG2) - own_level[None, :])
        live = here < last
        seen = live[None, :]
        if INTERVAL or TAGS or S % BLOCK:
            seen = seen & see(
                token[None, :],
                batch,
                block,
                offset,
                q_tags,
                k_tags,
                T,
                S,
                BLOCK,
                BEFORE,
                AFTER,
                INTERVAL,
                TAGS,
            )
        p = tl.where(seen, p, 0.0)
        to_values = tl.dot(p.to(cotangent.dtype), cotangent, to_values)
        ds = p * (tl.dot(values, tl.trans(cotangent)) - own_delta[None, :])
        ds = tl.where(seen, ds, 0.0).to(queries.dtype)
        to_keys = tl.dot(ds, queries, to_keys)
        result = tl.dot(tl.trans(ds), keys) * SCALE
        slot = (batch.to(tl.int64) * (T * COUNT) + pair) * HEADS + head
        to = dq + slot[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(to, result.to(dq.dtype.element_ty), mask=live[:, None])
    place = (batch * PARTS + part) * (BLOCKS * BLOCK) + block * BLOCK + tl.arange(0, BLOCK)
    place = (place.to(tl.int64) * GROUPS + group) * WIDTH
    to = place[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(dk + to, to_keys * SCALE)
    tl.store(dv + to, to_values)


@triton.jit
@no_type_check
def share_pointers(
    shares, batch, group, token, block, T: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr
):
    """Return where shares lie, of tokens [n] and blocks [m]: [n, m]."""
    line = ((batch * GROUPS + group).to(tl.int64) * T + token) * BLOCKS
    return shares + line[:, None] + block[None, :]


@triton.jit
@no_type_check
def may_choose(
    ids, numbers, block_ids, block_numbers, batch, token, block, T: tl.constexpr, BLOCKS: tl.constexpr
):
    """Return whether tokens [n] may choose blocks [m], of their document and of lower numbers: [n, m]."""
    own, number = tl.load(ids + batch * T + token), tl.load(numbers + batch * T + token)
    place = batch * BLOCKS + tl.minimum(block, BLOCKS - 1)
    other, turn = tl.load(block_ids + place), tl.load(block_numbers + place)
    seen = (own[:, None] == other[None, :]) & (turn[None, :] < number[:, None])
    return seen & (block < BLOCKS)[None, :]


@triton.jit
@no_type_check
def block_shares(
    q,
    k,
    ids,
    numbers,
    block_ids,
    block_numbers,
    shares,
    T: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write shares of attention to one key a block, summed over heads: [B, G, T, BLOCKS]; -1 where not seen.

    Nothing is written in tiles that no token of a program sees.
    """
    SHARE: tl.constexpr = HEADS // GROUPS
    strips: tl.constexpr = (T + TOKENS - 1) // TOKENS
    strip, line = tl.program_id(0) % strips, tl.program_id(0) // strips
    batch, group = line // GROUPS, line % GROUPS
    member = tl.arange(0, TOKENS * SHARE)
    token = tl.minimum(strip * TOKENS + member // SHARE, T - 1)
    place = ((batch * T + token).to(tl.int64) * HEADS + group * SHARE + member % SHARE) * WIDTH
    queries = tl.load(q + place[:, None] + tl.arange(0, WIDTH)[None, :])
    own = strip * TOKENS + tl.arange(0, TOKENS)
    begin, end = BLOCKS, 0
    for at in range(0, BLOCKS, COLUMNS):
        block = at + tl.arange(0, COLUMNS)
        seen = may_choose(
            ids, numbers, block_ids, block_numbers, batch, tl.minimum(own, T - 1), block, T, BLOCKS
        )
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0
        begin, end = tl.where(some & (at < begin), at, begin), tl.where(some, at + COLUMNS, end)
    total = tl.zeros((TOKENS * SHARE,), tl.float32)
    top = tl.full((TOKENS * SHARE,), FLOOR, tl.float32)
    for again in tl.static_range(2):
        level = top + tl.log2(tl.where(total > 0, total, 1.0))
        for at in range(begin, end, COLUMNS):
            block = at + tl.arange(0, COLUMNS)
            inside = tl.minimum(block, BLOCKS - 1)
            rows = ((batch * BLOCKS + inside).to(tl.int64) * GROUPS + group) * WIDTH
            keys = tl.load(k + rows[:, None] + tl.arange(0, WIDTH)[None, :])
            seen = may_choose(ids, numbers, block_ids, block_numbers, batch, token, block, T, BLOCKS)
            scores = tl.dot(queries, tl.trans(keys)) * (SCALE / LOG2)
            scores = tl.where(seen, scores, -float("inf"))
            if again:
                p = tl.where(seen, tl.exp2(scores - level[:, None]), -1.0)
                p = tl.sum(tl.reshape(p, (TOKENS, SHARE, COLUMNS)), 1)
                to = share_pointers(shares, batch, group, own, block, T, BLOCKS, GROUPS)
                tl.store(to, p, mask=(own < T)[:, None] & (block < BLOCKS)[None, :])
            else:
                higher = tl.maximum(top, tl.max(scores, 1))
                total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
                top = higher


@triton.jit
@no_type_check
def largest(
    shares,
    ids,
    numbers,
    block_ids,
    block_numbers,
    found,
    T: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the indices of the COUNT largest shares of ROWS tokens, [B, T, G, COUNT]; -1 where there are fewer."""
    strips: tl.constexpr = (T + ROWS - 1) // ROWS
    strip, line = tl.program_id(0) % strips, tl.program_id(0) // strips
    batch, group = line // GROUPS, line % GROUPS
    own = strip * ROWS + tl.arange(0, ROWS)
    token = tl.minimum(own, T - 1)
    block = tl.arange(0, WIDE)
    seen = may_choose(ids, numbers, block_ids, block_numbers, batch, token, block, T, BLOCKS)
    left = tl.load(
        share_pointers(shares, batch, group, token, block, T, BLOCKS, GROUPS), mask=seen, other=-1.0
    )
    place = ((batch * T + own).to(tl.int64) * GROUPS + group) * COUNT
    for rank in range(COUNT):
        most, best = tl.max(left, 1, return_indices=True)
        tl.store(found + place + rank, tl.where(most >= 0, best, -1), mask=own < T)
        left = tl.where(block[None, :] == best[:, None], -2.0, left)
