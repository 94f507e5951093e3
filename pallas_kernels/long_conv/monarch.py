"""Long convolutions by the DFT as dense products of small matrices, in fp16 with fp32 sums: tensor cores do them."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels._hopper import why_not_streams
from pallas_kernels.long_conv.monarch_vjp import Form, gated
from pallas_kernels.long_conv.packed import packed_rows, parts_by_size

LONGEST = 1 << 24
"""Longer rows would overflow the 32-bit phases of the matrices."""

TIMED = (8192, 1 << 20)
"""Steps of the shortest and about the longest row that were timed on an H200: 1.7 to 2.3 times as fast as FFTs."""


def monarch_product(
    filter: Float[Array, "D F"], u: Float[Array, "B D N C"], *, rows: int, offset: int
) -> Float[Array, "B D N rows"]:
    """Return y_i = sum_j filter[offset + i - j] u_j for i < rows, in each of N blocks.

    0 <= offset, in fp32.
    """
    form = Form(rows, offset, jnp.dtype(accumulator(u.dtype)))
    filter, u = vary_alike(filter, u)
    return gated(form, filter, None, u, None, None, None)


def long_conv_monarch(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
) -> Float[Array, "B D T"]:
    """Compute `long_conv` by Monarch products."""
    centre = 0 if causal else (filter.shape[1] - 1) // 2
    taps = filter.astype(accumulator(x.dtype))
    if segment_ids is None or segment_alignment >= x.shape[2]:
        form = Form(x.shape[2], centre, x.dtype)
        weights, streams = (taps, bias), (x, pre_gate, post_gate, segment_ids)
        blocks = (None if z is None else _one_block(z) for z in streams)
        y: Any = gated(form, *vary_alike(*weights, *blocks))
        return y[:, :, 0]
    h = add_skip(taps, bias, centre)
    u = enter(x, pre_gate, segment_ids)
    options = {"centre": centre, "causal": causal, "alignment": segment_alignment}
    y = packed_rows(u, h, jnp.abs(segment_ids), **options, parts=parts_by_size(monarch_product))
    return leave(y, post_gate, segment_ids, x.dtype)


def _one_block(z: Array) -> Array:
    """Return [B, D, T] as [B, D, 1, T], and segment ids [B, T] as [B, 1, 1, T]."""
    return z[:, :, None] if z.ndim == 3 else z[:, None, None]


def why_not_monarch(device: Any, x: Any, filter: Any, **options: Any) -> str | None:
    """Return why it cannot run such a call, or None."""
    if x.shape[2] > LONGEST:
        return f"rows of {x.shape[2]} steps, at most {LONGEST}"
    return None


def rather_not_monarch(device: Any, x: Any, filter: Any, *, segment_ids: Any = None, **_: Any) -> str | None:
    """Return why FFTs go first, or None where it was timed and is faster."""
    if (reason := why_not_streams(device, x)) is not None:
        return f"it was timed with bf16 streams on an H200 alone, and {reason}"
    if segment_ids is not None:
        return "packed rows have been timed in it at 8,192 steps alone, where the kernels are faster"
    if not TIMED[0] <= (length := x.shape[2]) <= TIMED[1]:
        return f"it was timed at {TIMED[0]} to {TIMED[1]} steps, not at {length}"
    return None
