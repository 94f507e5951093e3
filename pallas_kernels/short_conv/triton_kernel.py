"""The short convolution and its gradients in Triton's language; imported where they run, as many machines lack Triton.

With g = post dy and u = pre x, over steps of one document:

    y_t = post_t sum_k weights_k u_{t-k}
    du_t = sum_k weights_k g_{t+k},  dx = pre du,  dpre = x du,  dpost = dy conv(u),  dweights_k = sum_t u_t g_{t+k}.

Steps are loaded and stored in pairs that are aligned in memory. Where T is odd, every second row begins with the second
half of a pair. Its steps are in the slots from `first` on, which is 0 or 1. Pointers to a row are to its slot 0.

Packed rows bring one word of 32 bits for each pair, which `triton_reach` makes of the segment ids. Of each step a bit
says whether it is a token, one for each lag behind whether u counts there, and one for each lag ahead whether a
cotangent does. Words keep tests cheap: a bit of a word is tested by one instruction, while LLVM joins the tests of two
integers of 16 bits and takes the results apart again. A value is masked before it is multiplied, so that product and
sum stay one instruction.

No annotation is checked here: Triton compiles the source of these functions and never calls them.
"""

from typing import no_type_check

import triton
import triton.language as tl

from pallas_kernels.short_conv.triton_reach import AHEAD, ODD

FIRST_AHEAD = tl.constexpr(AHEAD)
EVEN_STEP = tl.constexpr(0)
ODD_STEP = tl.constexpr(ODD)


@triton.jit
@no_type_check
def place(LENGTH: tl.constexpr, PAIRS: tl.constexpr):
    """Return this program's row, its first slot, and its 2 PAIRS slots in pairs: [PAIRS, 2]."""
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (row % 2 * (LENGTH % 2)).to(tl.int32)
    start = tl.program_id(0) % tiles * (2 * PAIRS)
    return row, first, start + 2 * tl.arange(0, PAIRS)[:, None] + tl.arange(0, 2)[None, :]


@triton.jit
@no_type_check
def load(stream, slots, first, LENGTH: tl.constexpr):
    """Load a row's steps, with holes and padding as they are, and 0 outside.

    Where a row begins or ends amid a pair, the other half is loaded and dropped. After the last row that half is past
    the array's end, but in the same aligned word as its last step.
    """
    z = tl.load(stream + slots, mask=(slots >= 0) & (slots < LENGTH + LENGTH % 2), other=0)
    return tl.where((slots >= first) & (slots < first + LENGTH), z, 0) if LENGTH % 2 else z


@triton.jit
@no_type_check
def store(stream, slots, first, z, LENGTH: tl.constexpr):
    """Write z; the half of a pair that two rows share is written by itself."""
    z = z.to(stream.dtype.element_ty)
    pairs = (slots >= 2 * first) & (slots < LENGTH - LENGTH % 2 + 2 * first)
    tl.store(stream + slots, z, mask=pairs)
    if LENGTH % 2:
        tl.store(stream + slots, z, mask=slots == tl.where(first == 0, LENGTH - 1, 1))


@triton.jit
@no_type_check
def reached(reach, row, first, slots, CHANNELS: tl.constexpr, LENGTH: tl.constexpr):
    """Load the words of the pairs at `slots`; 0 past the row's end."""
    steps: tl.constexpr = LENGTH + LENGTH % 2
    even, _ = tl.split(slots)
    # Count in halves of words: if Triton knew that words follow one another, each thread would load four of them, and
    # all would then change places through shared memory.
    halves = reach.to(tl.pointer_type(tl.int16), bitcast=True)
    halves += (row // CHANNELS * (1 + LENGTH % 2) + first) * steps
    return tl.load((halves + even).to(tl.pointer_type(tl.int32), bitcast=True), mask=even < steps, other=0)


@triton.jit
@no_type_check
def where_bit(word, PLACE: tl.constexpr, z, PACKED: tl.constexpr):
    """Return z where the word has the bit, 0 elsewhere; z where rows are not packed."""
    return tl.where(((word >> PLACE) & 1) != 0, z, 0.0) if PACKED else z


@triton.jit
@no_type_check
def where_token(word, z, PACKED: tl.constexpr):
    """Return z [PAIRS, 2] at tokens, 0 at holes and padding."""
    if PACKED:
        even, odd = tl.split(z)
        z = tl.join(where_bit(word, EVEN_STEP, even, PACKED), where_bit(word, ODD_STEP, odd, PACKED))
    return z


@triton.jit
@no_type_check
def gated(x, pre, slots, first, LENGTH: tl.constexpr, PRE: tl.constexpr):
    """Return u = pre x of a row's steps, 0 outside, in x's dtype."""
    u = load(x, slots, first, LENGTH)
    if PRE:
        gate = load(pre, slots, first, LENGTH)
        u = (gate.to(tl.float32) * u.to(tl.float32)).to(u.dtype)
    return u


@triton.jit
@no_type_check
def term(weights, u, word, STEP: tl.constexpr, LAG: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """Return what lag LAG adds to one step of each pair.

    It is weights_LAG u, where u counts there; 0 if it is no tap.
    """
    if LAG < 0 or LAG >= TAPS:
        return tl.zeros_like(u)
    return tl.load(weights + LAG) * where_bit(word, STEP + LAG, u, PACKED)


@triton.jit
@no_type_check
def convolved(
    x,
    weights,
    pre,
    history,
    slots,
    first,
    word,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    PRE: tl.constexpr,
    HISTORY: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return sum_k weights_k u_{t-k} at `slots` of one row, to which all pointers point.

    `word` is read if the row is packed. It is zero for holes and padding, if weights are finite.
    """
    even = tl.zeros(slots.shape[:1], tl.float32)
    odd = tl.zeros(slots.shape[:1], tl.float32)
    for back in tl.static_range(TAPS // 2 + 1):
        at = slots - 2 * back
        u = gated(x, pre, at, first, LENGTH, PRE)
        if HISTORY:
            past = (at < first) & (at > first - TAPS)
            before = tl.load(history + at + (TAPS - 1), mask=past, other=0)
            u = tl.where(past, before.to(u.dtype), u)
        u_even, u_odd = tl.split(u.to(tl.float32))
        even += term(weights, u_even, word, EVEN_STEP, 2 * back, TAPS, PACKED)
        even += term(weights, u_odd, word, EVEN_STEP, 2 * back - 1, TAPS, PACKED)
        odd += term(weights, u_odd, word, ODD_STEP, 2 * back, TAPS, PACKED)
        odd += term(weights, u_even, word, ODD_STEP, 2 * back + 1, TAPS, PACKED)
    return tl.join(even, odd)


@triton.jit
@no_type_check
def short_conv(
    x,
    weights,
    pre,
    post,
    history,
    reach,
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
    """Convolve 2 PAIRS steps of one row.

    `row` counts groups of weights, then batch, then channels; at most one tile is partial. Streams and y are [groups,
    BATCH, CHANNELS, LENGTH], weights [groups, CHANNELS, TAPS] in fp32, history as in `short_conv` with a leading
    groups, and reach [groups, BATCH, 1 + LENGTH % 2, words]. PRE, POST, HISTORY and PACKED say which arrays are there;
    the others are not read.
    """
    row, first, slots = place(LENGTH, PAIRS)
    weights += (row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS) * TAPS
    history += row * (TAPS - 1) - first
    stream = tl.multiple_of(row * LENGTH - first, 2)
    word = reached(reach, row, first, slots, CHANNELS, LENGTH) if PACKED else 0
    out = convolved(
        x + stream, weights, pre + stream, history, slots, first, word, LENGTH, TAPS, PRE, HISTORY, PACKED
    )
    if POST:
        out *= where_token(word, load(post + stream, slots, first, LENGTH).to(tl.float32), PACKED)
    store(y + stream, slots, first, out, LENGTH)


@triton.jit
@no_type_check
def cotangents(dy, post, slots, first, LENGTH: tl.constexpr, POST: tl.constexpr):
    """Return g = post dy of a row's steps, in fp32; 0 outside."""
    g = load(dy, slots, first, LENGTH).to(tl.float32)
    if POST:
        g *= load(post, slots, first, LENGTH).to(tl.float32)
    return g


@triton.jit
@no_type_check
def terms(
    weights, u, g, word, STEP: tl.constexpr, LAG: tl.constexpr, TAPS: tl.constexpr, PACKED: tl.constexpr
):
    """Return what the cotangent g, LAG steps later, adds to du and to dweights_LAG.

    Both are 0 if LAG is no tap.
    """
    if LAG < 0 or LAG >= TAPS:
        return tl.zeros_like(u), tl.zeros_like(u)
    # Hide a hole from itself: its u is zero, but its cotangent may be NaN.
    seen = where_bit(word, STEP + (0 if LAG == 0 else FIRST_AHEAD + LAG), g, PACKED)
    return tl.load(weights + LAG) * seen, u * seen


@triton.jit
@no_type_check
def transposed(
    u,
    weights,
    dy,
    post,
    slots,
    first,
    word,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,
    POST: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Return du at `slots` of one row, to which all pointers point, and u_t g_{t+k}.

    The latter is one vector of products a tap. u is zero where there is no token, and so is du if weights are finite,
    whatever dy is there.
    """
    u_even, u_odd = tl.split(u.to(tl.float32))
    even = tl.zeros_like(u_even)
    odd = tl.zeros_like(u_odd)
    rest = tl.zeros_like(u_even)
    products = ()
    for ahead in tl.static_range(TAPS // 2 + 1):
        at = slots + 2 * ahead
        g_even, g_odd = tl.split(cotangents(dy, post, at, first, LENGTH, POST))
        even_even, same_even = terms(weights, u_even, g_even, word, EVEN_STEP, 2 * ahead, TAPS, PACKED)
        odd_odd, same_odd = terms(weights, u_odd, g_odd, word, ODD_STEP, 2 * ahead, TAPS, PACKED)
        odd_even, before = terms(weights, u_odd, g_even, word, ODD_STEP, 2 * ahead - 1, TAPS, PACKED)
        even_odd, after = terms(weights, u_even, g_odd, word, EVEN_STEP, 2 * ahead + 1, TAPS, PACKED)
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
    """Sum each of WIDTH vectors in one reduction, as each reduction waits for all warps.

    WIDTH is a power of two from 2 on; the result is [WIDTH].
    """
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
    reach,
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
    """Write gradients at 2 PAIRS steps of one row; arrays as the forward kernel has them.

    Of the weights it leaves this program's part: parts is [groups, CHANNELS, TAPS, BATCH * tiles]. What history adds
    to them is left out. dpre and dpost are not written where there is no such gate.
    """
    row, first, slots = place(LENGTH, PAIRS)
    channel = row // (BATCH * CHANNELS) * CHANNELS + row % CHANNELS
    weights += channel * TAPS
    history += row * (TAPS - 1) - first
    stream = tl.multiple_of(row * LENGTH - first, 2)
    word = reached(reach, row, first, slots, CHANNELS, LENGTH) if PACKED else 0
    u = where_token(word, gated(x + stream, pre + stream, slots, first, LENGTH, PRE), PACKED)
    du, products = transposed(
        u, weights, dy + stream, post + stream, slots, first, word, LENGTH, TAPS, POST, PACKED
    )
    if POST:
        out = convolved(
            x + stream,
            weights,
            pre + stream,
            history,
            slots,
            first,
            word,
            LENGTH,
            TAPS,
            PRE,
            HISTORY,
            PACKED,
        )
        out *= where_token(word, load(dy + stream, slots, first, LENGTH).to(tl.float32), PACKED)
    if PRE:
        source = where_token(word, load(x + stream, slots, first, LENGTH).to(tl.float32), PACKED)
        gate = where_token(word, load(pre + stream, slots, first, LENGTH).to(tl.float32), PACKED)
        store(dpre + stream, slots, first, source * du, LENGTH)
        du *= gate
    if POST:
        store(dpost + stream, slots, first, out, LENGTH)
    store(dx + stream, slots, first, du, LENGTH)
    tiles: tl.constexpr = (LENGTH + 2 * PAIRS - 1) // (2 * PAIRS)
    count: tl.constexpr = BATCH * tiles
    parts += channel * (TAPS * count) + row // CHANNELS % BATCH * tiles + tl.program_id(0) % tiles
    width: tl.constexpr = max(2, triton.next_power_of_2(TAPS))
    for _ in tl.static_range(width - TAPS):
        products += (tl.zeros([PAIRS], tl.float32),)
    taps = tl.arange(0, width)
    tl.store(parts + taps * count, sums(products, width), mask=taps < TAPS)
