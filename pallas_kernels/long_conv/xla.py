"""One FFT per row; packed rows by halves, so that each transform serves only one document."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels.long_conv.fft import fft_product
from pallas_kernels.long_conv.packed import packed_rows, parts_by_size


def long_conv_xla(
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
    """Compute `long_conv` by XLA's FFT."""
    u = enter(x, pre_gate, segment_ids)
    centre = 0 if causal else (filter.shape[1] - 1) // 2
    h = add_skip(filter.astype(accumulator(x.dtype)), bias, centre)
    if segment_ids is None or segment_alignment >= x.shape[2]:
        y = fft_product(h, u[:, :, None], rows=x.shape[2], offset=centre)[:, :, 0]
    else:
        options = {"centre": centre, "causal": causal, "alignment": segment_alignment}
        y = packed_rows(u, h, jnp.abs(segment_ids), **options, parts=parts_by_size(fft_product))
    return leave(y, post_gate, segment_ids, x.dtype)
