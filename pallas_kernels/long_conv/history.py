"""The share of inputs before a row in its outputs: long convolutions of streams that come in pieces."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._conv.gates import accumulator, check_filter
from pallas_kernels.long_conv.fft import fft_product


def long_conv_history(
    past: Float[Array, "B D S"], filter: Float[Array, "D F"], *, steps: int
) -> Float[Array, "B D steps"]:
    """Return the share of S earlier inputs in the next outputs of a causal `long_conv`.

    y_t = sum_s h[S + t - s] past_s for t < steps, in fp32, by one FFT of about min(S, L) + steps points.

    Args:
      past: inputs (pre_gate times x), oldest first, zero where they are of another document or none.
      filter: L taps, lag 0 first.
      steps: outputs that are asked for, at least 1.

    Raises:
      ValueError: `past` is not [B, D, S], the filter does not fit it, or `steps` is less than 1.
    """
    if past.ndim != 3:
        raise ValueError(f"long_conv_history: past must be [batch, channels, time], got shape {past.shape}")
    check_filter("long_conv_history", past, filter, True)
    if steps < 1:
        raise ValueError(f"long_conv_history: steps must be at least 1, got {steps}")
    size = min(past.shape[2], filter.shape[1] - 1)
    if size == 0:
        return jnp.zeros((*past.shape[:2], steps), accumulator(past.dtype))
    blocks = past[:, :, None, past.shape[2] - size :]
    return fft_product(filter, blocks, rows=steps, offset=size)[:, :, 0]
