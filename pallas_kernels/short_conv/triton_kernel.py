"""The short convolution in Triton's language; imported where it runs, as many machines lack Triton.

No annotation is checked here: Triton compiles the source of these functions and never calls them.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def term(weights, u, now, then, LAG: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """What lag LAG adds to steps of the documents `now`: weights_LAG u, within a document; 0 if it is no tap."""
    if LAG < 0 or LAG >= TAPS:
        return tl.zeros_like(u)
    product = tl.load(weights + LAG) * u
    return tl.where(now == then, product, 0.0) if PACKED else product


@triton.jit
@no_type_check
def kernel(
    x,
    weights,
    pre,
    post,
    history,
    ids,
    y,
    BATCH: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    PAIRS: tl.constexpr,
    PRE: tl.constexpr,
    POST: tl.constexpr,
    HISTORY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """2 PAIRS steps of one row: `row` counts groups of weights, then batch, then channels; at most one tile is partial.

    Streams and y are [groups, BATCH, CHANNELS, LENGTH], weights [groups, CHANNELS, TAPS] in fp32, history and ids as
    in `short_conv` with a leading groups. PRE, POST, HISTORY and PACKED say which arrays are there; the others are
    not read.
    """
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * (2 * PAIRS)
    steps = start + 2 * tl.arange(0, PAIRS)[:, None] + tl.arange(0, 2)[None, :]
    weights += (row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS) * TAPS
    ids += row // CHANNELS * LENGTH
    stream = row * LENGTH
    inside = steps < LENGTH
    id = tl.load(ids + steps, mask=inside, other=0) if PACKED else tl.full([PAIRS, 2], 1, tl.int32)
    now_even, now_odd = tl.split(tl.abs(id))
    even = tl.zeros([PAIRS], tl.float32)
    odd = tl.zeros([PAIRS], tl.float32)
    for back in tl.static_range(TAPS // 2 + 1):
        at = steps - 2 * back
        token = (at >= 0) & (at < LENGTH)
        then = tl.full([PAIRS, 2], 1, tl.int32)
        if PACKED:
            then = tl.load(ids + at, mask=token, other=0)
            token = token & (then > 0)
            then = tl.abs(tl.where(at < 0, tl.load(ids), then))
        u = tl.load(x + stream + at, mask=token, other=0)
        if PRE:
            gate = tl.load(pre + stream + at, mask=token, other=0)
            u = (gate.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
        if HISTORY:
            past = (at < 0) & (at > -TAPS)
            before = tl.load(history + row * (TAPS - 1) + at + (TAPS - 1), mask=past, other=0)
            u = tl.where(past, before.to(u.dtype), u)
        u_even, u_odd = tl.split(u.to(tl.float32))
        then_even, then_odd = tl.split(then)
        even += term(weights, u_even, now_even, then_even, 2 * back, TAPS, PACKED)
        even += term(weights, u_odd, now_even, then_odd, 2 * back - 1, TAPS, PACKED)
        odd += term(weights, u_odd, now_odd, then_odd, 2 * back, TAPS, PACKED)
        odd += term(weights, u_even, now_odd, then_even, 2 * back + 1, TAPS, PACKED)
    out = tl.join(even, odd)
    if POST:
        out *= tl.load(post + stream + steps, mask=inside & (id > 0), other=0).to(tl.float32)
    out = tl.where(id > 0, out, 0.0)
    tl.store(y + stream + steps, out.to(y.dtype.element_ty), mask=inside)
