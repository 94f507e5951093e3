"""The short convolution and its gradients in Triton's language; imported where they run, as many machines lack Triton.

With g = post dy and u = pre x, over steps of one document:

    y_t = post_t sum_k weights_k u_{t-k}
    du_t = sum_k weights_k g_{t+k},  dx = pre du,  dpre = x du,  dpost = dy conv(u),  dweights_k = sum_t u_t g_{t+k}.

Steps are loaded and stored in pairs that are aligned in memory. Where T is odd, every second row begins with the second
half of a pair: its steps are in the slots from `first` on, first being 0 or 1, and pointers to a row are to its slot 0.

No annotation is checked here: Triton compiles the source of these functions and never calls them.
"""

from typing import no_type_check

import triton
import triton.language as tl

NO_ID = tl.constexpr(-(2**31))
"""Less than any segment id."""


@triton.jit
@no_type_check
def place(LENGTH: tl.constexpr, PAIRS: tl.constexpr):
    """The row that this program works on, its first slot, and the program's 2 PAIRS slots in pairs: [PAIRS, 2]."""
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (row % 2 * (LENGTH % 2)).to(tl.int32)
    start = tl.program_id(0) % tiles * (2 * PAIRS)
    return row, first, start + 2 * tl.arange(0, PAIRS)[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
@no_type_check
def load(stream, slots, first, LENGTH: tl.constexpr):
    """A row's steps, with holes and padding as they are, and 0 outside.

    Where a row begins or ends amid a pair, the other half is loaded and dropped. After the last row that half is past
    the array's end, but in the same aligned word as its last step.
    """
    z = tl.load(stream + slots, mask=(slots >= 0) & (slots < LENGTH + LENGTH % 2), other=0)
    return tl.where((slots >= first) & (slots < first + LENGTH), z, 0) if LENGTH % 2 else z


@triton.jit
@no_type_check
def store(stream, slots, first, id, z, LENGTH: tl.constexpr):
    """Writes z where `id` is a token's and 0 elsewhere; the half of a pair that two rows share is written alone."""
    z = tl.where(id > 0, z, 0.0).to(stream.dtype.element_ty)
    pairs = (slots >= 2 * first) & (slots < LENGTH - LENGTH % 2 + 2 * first)
    tl.store(stream + slots, z, mask=pairs)
    if LENGTH % 2:
        tl.store(stream + slots, z, mask=slots == tl.where(first == 0, LENGTH - 1, 1))


@triton.jit
@no_type_check
def documents(ids, slots, first, LENGTH: tl.constexpr, PACKED: tl.constexpr):
    """The segment ids of a row's steps, 0 outside; all 1 where rows are not packed."""
    inside = (slots >= first) & (slots < first + LENGTH)
    return tl.load(ids + slots, mask=inside, other=0) if PACKED else tl.full(slots.shape, 1, tl.int32)


@triton.jit
@no_type_check
def gated(x, pre, slots, first, LENGTH: tl.constexpr, PRE: tl.constexpr):
    """u = pre x of a row's steps, 0 outside, in x's dtype."""
    u = load(x, slots, first, LENGTH)
    if PRE:
        gate = load(pre, slots, first, LENGTH)
        u = (gate.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
    return u


@triton.jit
@no_type_check
def term(weights, u, now, then, LAG: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """What lag LAG adds to tokens of documents `now`: weights_LAG u, within a document; 0 if it is no tap."""
    if LAG < 0 or LAG >= TAPS:
        return tl.zeros_like(u)
    product = tl.load(weights + LAG) * u
    return tl.where(now == then, product, 0.0) if PACKED and LAG > 0 else product


@triton.jit
@no_type_check
def convolved(
    x,
    weights,
    pre,
    history,
    ids,
    slots,
    first,
    id,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    PRE: tl.constexpr,
    HISTORY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """sum_k weights_k u_{t-k} at `slots` of one row, to which all pointers point, and whose segment ids are `id`.

    What it returns for holes and padding is of no use.
    """
    now_even, now_odd = tl.split(id)
    even = tl.zeros(now_even.shape, tl.float32)
    odd = tl.zeros(now_odd.shape, tl.float32)
    for back in tl.static_range(TAPS // 2 + 1):
        at = slots - 2 * back
        then = documents(ids, at, first, LENGTH, PACKED)
        u = gated(x, pre, at, first, LENGTH, PRE)
        if HISTORY:
            past = (at < first) & (at > first - TAPS)
            then = tl.where(past, tl.abs(tl.load(ids + first)), then) if PACKED else then
            before = tl.load(history + at + (TAPS - 1), mask=past, other=0)
            u = tl.where(past, before.to(u.dtype), u)
        u_even, u_odd = tl.split(u.to(tl.float32))
        then_even, then_odd = tl.split(then)
        even += term(weights, u_even, now_even, then_even, 2 * back, TAPS, PACKED)
        even += term(weights, u_odd, now_even, then_odd, 2 * back - 1, TAPS, PACKED)
        odd += term(weights, u_odd, now_odd, then_odd, 2 * back, TAPS, PACKED)
        odd += term(weights, u_even, now_odd, then_even, 2 * back + 1, TAPS, PACKED)
    return tl.join(even, odd)


@triton.jit
@no_type_check
def short_conv(
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
    row, first, slots = place(LENGTH, PAIRS)
    weights += (row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS) * TAPS
    ids += row // CHANNELS * LENGTH - first
    history += row * (TAPS - 1) - first
    stream = tl.multiple_of(row * LENGTH - first, 2)
    id = documents(ids, slots, first, LENGTH, PACKED)
    out = convolved(
        x + stream, weights, pre + stream, history, ids, slots, first, id, LENGTH, TAPS, PRE, HISTORY, PACKED
    )
    if POST:
        out *= load(post + stream, slots, first, LENGTH).to(tl.float32)
    store(y + stream, slots, first, id, out, LENGTH)


@triton.jit
@no_type_check
def cotangents(dy, post, slots, first, LENGTH: tl.constexpr, POST: tl.constexpr):
    """g = post dy of a row's steps, in fp32; 0 outside."""
    g = load(dy, slots, first, LENGTH).to(tl.float32)
    if POST:
        g *= load(post, slots, first, LENGTH).to(tl.float32)
    return g


@triton.jit
@no_type_check
def terms(weights, u, g, now, then, LAG: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """What the cotangent g, LAG steps later, adds to du and to dweights_LAG; 0 and 0 if LAG is no tap."""
    if LAG < 0 or LAG >= TAPS:
        return tl.zeros_like(u), tl.zeros_like(u)
    seen = tl.where(now == then, g, 0.0) if PACKED else g
    return tl.load(weights + LAG) * seen, u * seen


@triton.jit
@no_type_check
def transposed(
    u,
    weights,
    dy,
    post,
    ids,
    slots,
    first,
    id,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    POST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """du at `slots` of one row, to which all pointers point, and u_t g_{t+k}: one vector of products a tap.

    u is zero where there is no token, and du there is of no use.
    """
    # Keep a hole from seeing itself: its u is zero, but its cotangent may be NaN.
    id = tl.where(id > 0, id, NO_ID)
    u_even, u_odd = tl.split(u.to(tl.float32))
    now_even, now_odd = tl.split(id)
    even = tl.zeros_like(u_even)
    odd = tl.zeros_like(u_odd)
    rest = tl.zeros_like(u_even)
    products = ()
    for ahead in tl.static_range(TAPS // 2 + 1):
        at = slots + 2 * ahead
        then = documents(ids, at, first, LENGTH, PACKED)
        g_even, g_odd = tl.split(cotangents(dy, post, at, first, LENGTH, POST))
        then_even, then_odd = tl.split(then)
        even_even, same_even = terms(weights, u_even, g_even, now_even, then_even, 2 * ahead, TAPS, PACKED)
        odd_odd, same_odd = terms(weights, u_odd, g_odd, now_odd, then_odd, 2 * ahead, TAPS, PACKED)
        odd_even, before = terms(weights, u_odd, g_even, now_odd, then_even, 2 * ahead - 1, TAPS, PACKED)
        even_odd, after = terms(weights, u_even, g_odd, now_even, then_odd, 2 * ahead + 1, TAPS, PACKED)
        even += even_even + even_odd
        odd += odd_odd + odd_even
        if ahead > 0:
            products += (rest + before,)
        if 2 * ahead < TAPS:
            products += (same_even + same_odd,)
        rest = after
    return tl.join(even, odd), products


@triton.jit
@no_type_check
def sums(products, WIDTH: tl.constexpr):
    """Of each of WIDTH vectors, a power of two from 2 on: [WIDTH], in one reduction, as each waits for all warps."""
    for level in tl.static_range(WIDTH.bit_length() - 1):
        joined = ()
        for i in tl.static_range(WIDTH >> (level + 1)):
            joined += (tl.join(products[i], products[i + (WIDTH >> (level + 1))]),)
        products = joined
    return tl.reshape(tl.sum(products[0], axis=0), [WIDTH])


@triton.jit
@no_type_check
def short_conv_vjp(
    x,
    weights,
    pre,
    post,
    history,
    ids,
    dy,
    dx,
    parts,
    dpre,
    dpost,
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
    """Gradients at 2 PAIRS steps of one row; arrays as the forward kernel has them.

    Of the weights it leaves this program's part: parts is [groups, CHANNELS, TAPS, BATCH * tiles]. What history adds
    to them is left out. dpre and dpost are not written where there is no such gate.
    """
    row, first, slots = place(LENGTH, PAIRS)
    channel = row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS
    weights += channel * TAPS
    ids += row // CHANNELS * LENGTH - first
    history += row * (TAPS - 1) - first
    stream = tl.multiple_of(row * LENGTH - first, 2)
    id = documents(ids, slots, first, LENGTH, PACKED)
    u = tl.where(id > 0, gated(x + stream, pre + stream, slots, first, LENGTH, PRE), 0)
    du, products = transposed(
        u, weights, dy + stream, post + stream, ids, slots, first, id, LENGTH, TAPS, POST, PACKED
    )
    if POST:
        out = convolved(
            x + stream,
            weights,
            pre + stream,
            history,
            ids,
            slots,
            first,
            id,
            LENGTH,
            TAPS,
            PRE,
            HISTORY,
            PACKED,
        )
        out *= load(dy + stream, slots, first, LENGTH).to(tl.float32)
    if PRE:
        source = load(x + stream, slots, first, LENGTH).to(tl.float32)
        gate = load(pre + stream, slots, first, LENGTH).to(tl.float32)
        store(dpre + stream, slots, first, id, source * du, LENGTH)
        du *= gate
    if POST:
        store(dpost + stream, slots, first, id, out, LENGTH)
    store(dx + stream, slots, first, id, du, LENGTH)
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    count: tl.constexpr = BATCH * tiles
    parts += channel * (TAPS * count) + row // CHANNELS % BATCH * tiles + tl.program_id(0) % tiles
    width: tl.constexpr = max(2, triton.next_power_of_2(TAPS))
    for _ in tl.static_range(width - TAPS):
        products += (tl.zeros([PAIRS], tl.float32),)
    taps = tl.arange(0, width)
    tl.store(parts + taps * count, sums(products, width), mask=taps < TAPS)
