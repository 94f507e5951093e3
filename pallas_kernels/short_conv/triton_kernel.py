"""The short convolution and its gradients in Triton's language; imported where they run, as many machines lack Triton.

With g = post dy and u = pre x, over steps of one document:

    y_t = post_t sum_k weights_k u_{t-k}
    du_t = sum_k weights_k g_{t+k},  dx = pre du,  dpre = x du,  dpost = dy conv(u),  dweights_k = sum_t u_t g_{t+k}.

No annotation is checked here: Triton compiles the source of these functions and never calls them.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def place(LENGTH: tl.constexpr, PAIRS: tl.constexpr):
    """The row that this program works on, and its 2 PAIRS steps in pairs: [PAIRS, 2]."""
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    start = tl.program_id(0) % tiles * (2 * PAIRS)
    return row, start + 2 * tl.arange(0, PAIRS)[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
@no_type_check
def documents(ids, steps, inside, PACKED: tl.constexpr):
    """The segment ids of those steps that are `inside`, 0 elsewhere; all 1 where rows are not packed."""
    return tl.load(ids + steps, mask=inside, other=0) if PACKED else tl.full(steps.shape, 1, tl.int32)


@triton.jit
@no_type_check
def gated(x, pre, steps, token, PRE: tl.constexpr):
    """u = pre x of those steps that are tokens, 0 elsewhere, in x's dtype."""
    u = tl.load(x + steps, mask=token, other=0)
    if PRE:
        gate = tl.load(pre + steps, mask=token, other=0)
        u = (gate.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
    return u


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
def convolved(
    x,
    weights,
    pre,
    history,
    ids,
    steps,
    id,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    PRE: tl.constexpr,
    HISTORY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """sum_k weights_k u_{t-k} at `steps` of one row, to which all pointers point, and whose segment ids are `id`."""
    now_even, now_odd = tl.split(tl.abs(id))
    even = tl.zeros(now_even.shape, tl.float32)
    odd = tl.zeros(now_odd.shape, tl.float32)
    for back in tl.static_range(TAPS // 2 + 1):
        at = steps - 2 * back
        token = (at >= 0) & (at < LENGTH)
        then = documents(ids, at, token, PACKED)
        if PACKED:
            token = token & (then > 0)
            then = tl.abs(tl.where(at < 0, tl.load(ids), then))
        u = gated(x, pre, at, token, PRE)
        if HISTORY:
            past = (at < 0) & (at > -TAPS)
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
    row, steps = place(LENGTH, PAIRS)
    weights += (row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS) * TAPS
    ids += row // CHANNELS * LENGTH
    history += row * (TAPS - 1)
    stream = row * LENGTH
    inside = steps < LENGTH
    id = documents(ids, steps, inside, PACKED)
    out = convolved(
        x + stream, weights, pre + stream, history, ids, steps, id, LENGTH, TAPS, PRE, HISTORY, PACKED
    )
    if POST:
        out *= tl.load(post + stream + steps, mask=inside & (id > 0), other=0).to(tl.float32)
    out = tl.where(id > 0, out, 0.0)
    tl.store(y + stream + steps, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def cotangents(dy, post, steps, token, POST: tl.constexpr):
    """g = post dy of those steps that are tokens, in fp32; 0 elsewhere."""
    g = tl.load(dy + steps, mask=token, other=0).to(tl.float32)
    if POST:
        g *= tl.load(post + steps, mask=token, other=0).to(tl.float32)
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
    steps,
    id,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    POST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """du at `steps` of one row, to which all pointers point, and u_t g_{t+k}: one vector of products a tap.

    u is zero where there is no token, and du there is of no use.
    """
    u_even, u_odd = tl.split(u.to(tl.float32))
    now_even, now_odd = tl.split(id)
    even = tl.zeros_like(u_even)
    odd = tl.zeros_like(u_odd)
    rest = tl.zeros_like(u_even)
    products = ()
    for ahead in tl.static_range(TAPS // 2 + 1):
        at = steps + 2 * ahead
        token = at < LENGTH
        then = documents(ids, at, token, PACKED)
        g_even, g_odd = tl.split(cotangents(dy, post, at, token & (then > 0), POST))
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
    row, steps = place(LENGTH, PAIRS)
    channel = row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS
    weights += channel * TAPS
    ids += row // CHANNELS * LENGTH
    history += row * (TAPS - 1)
    stream = row * LENGTH
    inside = steps < LENGTH
    id = documents(ids, steps, inside, PACKED)
    token = inside & (id > 0)
    u = gated(x + stream, pre + stream, steps, token, PRE)
    du, products = transposed(
        u, weights, dy + stream, post + stream, ids, steps, id, LENGTH, TAPS, POST, PACKED
    )
    du = tl.where(token, du, 0.0)
    if POST:
        out = convolved(
            x + stream, weights, pre + stream, history, ids, steps, id, LENGTH, TAPS, PRE, HISTORY, PACKED
        )
        out *= tl.load(dy + stream + steps, mask=token, other=0).to(tl.float32)
    if PRE:
        source = tl.load(x + stream + steps, mask=token, other=0).to(tl.float32)
        gate = tl.load(pre + stream + steps, mask=token, other=0).to(tl.float32)
        tl.store(dpre + stream + steps, (source * du).to(dpre.dtype.element_ty), mask=inside)
        du *= gate
    if POST:
        tl.store(dpost + stream + steps, tl.where(token, out, 0.0).to(dpost.dtype.element_ty), mask=inside)
    tl.store(dx + stream + steps, du.to(dx.dtype.element_ty), mask=inside)
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    count: tl.constexpr = BATCH * tiles
    parts += channel * (TAPS * count) + row // CHANNELS % BATCH * tiles + tl.program_id(0) % tiles
    width: tl.constexpr = max(2, triton.next_power_of_2(TAPS))
    for _ in tl.static_range(width - TAPS):
        products += (tl.zeros([PAIRS], tl.float32),)
    taps = tl.arange(0, width)
    tl.store(parts + taps * count, sums(products, width), mask=taps < TAPS)
