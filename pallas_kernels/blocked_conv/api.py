"""The public function and its implementation table."""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._conv.gates import check_alignment, check_filter, check_streams
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import check_documents
from pallas_kernels.blocked_conv.hopper import why_not
from pallas_kernels.blocked_conv.reference import blocked_conv_reference
from pallas_kernels.blocked_conv.xla import blocked_conv_xla

LONGEST = 512


def _mosaic_gpu(*args: Any, **options: Any) -> Array:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.blocked_conv.mosaic_gpu import blocked_conv_mosaic_gpu

    return blocked_conv_mosaic_gpu(*args, **options)


TABLE = (
    Implementation("mosaic_gpu", _mosaic_gpu, why_not),
    Implementation("xla", blocked_conv_xla),
    Implementation("reference", blocked_conv_reference),
)
"""Implementations of the operation, fastest first."""


@checked
def blocked_conv(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
    implementation: Literal["mosaic_gpu", "xla", "reference"] | None = None,
) -> Float[Array, "B D T"]:
    """Convolve depthwise with a filter of medium length (L <= 512), its gates fused.

    y_t = post_gate_t * (sum_s h[t - s] u_s + bias u_t), with u = pre_gate * x, over the s of t's own document.

    Args:
      x: inputs, channel-major.
      filter: causal: L taps, lag 0 first. Bidirectional: 2L - 1 taps, lag 0 at index L - 1.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous. Nothing
        crosses from one to another; holes and padding count as time, their input as zero, their output is zero.
      segment_alignment: the caller's promise that documents start at multiples of it. A multiple of the block
        (L rounded up to 64, at least 128) is fastest.
      bias: the skip connection, one weight per channel.
      pre_gate: multiplies the input.
      post_gate: multiplies the output.
      causal: False also looks ahead.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y, in x's dtype. In bf16 the products take bf16 operands and sum in fp32.

    Raises:
      ValueError: shapes that do not fit, a longer filter, or an implementation that is unknown or cannot run here.

    Source: the two-stage blocked convolution of StripedHyena 2 (Ku et al. 2025, arXiv:2503.01868, sec. 3).
    """
    check_streams("blocked_conv", x, segment_ids, bias, pre_gate, post_gate)
    check_alignment("blocked_conv", segment_alignment)
    check_documents(segment_ids, segment_alignment, op="blocked_conv")
    check_filter("blocked_conv", x, filter, causal)
    taps = filter.shape[1] if causal else (filter.shape[1] + 1) // 2
    if taps > LONGEST:
        raise ValueError(f"blocked_conv: at most {LONGEST} taps, got {taps}: use long_conv")
    options = {
        "segment_ids": segment_ids,
        "segment_alignment": segment_alignment,
        "bias": bias,
        "pre_gate": pre_gate,
        "post_gate": post_gate,
        "causal": causal,
    }
    chosen = choose("blocked_conv", TABLE, implementation, current_device(), x, filter, **options)
    return chosen.run(x, filter, **options)


def explain(x: Any, filter: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(blocked_conv, device, x, filter, **options)
