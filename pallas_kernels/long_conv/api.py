"""The public function and its implementation table."""

from functools import partial
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._conv.gates import check_alignment, check_filter, check_streams
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import check_documents
from pallas_kernels.long_conv.hopper import rather_not, rather_not_half, why_not
from pallas_kernels.long_conv.monarch import long_conv_monarch, rather_not_monarch, why_not_monarch
from pallas_kernels.long_conv.reference import long_conv_reference
from pallas_kernels.long_conv.xla import long_conv_xla
from pallas_kernels.long_conv.xla_or_monarch import long_conv_xla_or_monarch, rather_not_xla_or_monarch


def _mosaic_gpu(*args: Any, **options: Any) -> Array:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.long_conv.mosaic_gpu import long_conv_mosaic_gpu

    return long_conv_mosaic_gpu(*args, **options)


TABLE = (
    Implementation("mosaic_gpu_half", partial(_mosaic_gpu, dtype="float16"), why_not, rather_not_half),
    Implementation("mosaic_gpu_vjp", _mosaic_gpu, why_not, rather_not),
    Implementation("xla_or_monarch", long_conv_xla_or_monarch, why_not_monarch, rather_not_xla_or_monarch),
    Implementation("monarch", long_conv_monarch, why_not_monarch, rather_not_monarch),
    Implementation("xla", long_conv_xla),
    Implementation("reference", long_conv_reference),
)
"""Implementations of the operation, fastest first."""


@checked
def long_conv(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
    implementation: Literal[
        "mosaic_gpu_half", "mosaic_gpu_vjp", "xla_or_monarch", "monarch", "xla", "reference"
    ]
    | None = None,
) -> Float[Array, "B D T"]:
    """Convolve depthwise with a filter of any length, its gates fused.

    y_t = post_gate_t * (sum_s h[t - s] u_s + bias u_t), with u = pre_gate * x, over the s of t's own document, in
    fp32. h is zero beyond its L taps; taps that no two steps of x are apart by are not read.

    Args:
      x: inputs, channel-major.
      filter: causal: L taps, lag 0 first. Bidirectional: 2L - 1 taps, lag 0 at index L - 1.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous. Nothing
        crosses from one to another; holes and padding count as time, their input as zero, their output is zero.
        One document per row needs none, nor do holes and padding that hold zeros.
      segment_alignment: the caller's promise that documents start at multiples of it; the larger, the faster.
      bias: the skip connection, one weight per channel.
      pre_gate: multiplies the input.
      post_gate: multiplies the output.
      causal: False also looks ahead.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y, in x's dtype.

    Raises:
      ValueError: shapes that do not fit, or an implementation that is unknown or cannot run here.

    Source: the long convolution of Hyena (Poli et al. 2023, arXiv:2302.10866, sec. 3).
    """
    check_streams("long_conv", x, segment_ids, bias, pre_gate, post_gate)
    check_alignment("long_conv", segment_alignment)
    check_documents(segment_ids, segment_alignment, op="long_conv")
    check_filter("long_conv", x, filter, causal)
    options = {
        "segment_ids": segment_ids,
        "segment_alignment": segment_alignment,
        "bias": bias,
        "pre_gate": pre_gate,
        "post_gate": post_gate,
        "causal": causal,
    }
    chosen = choose("long_conv", TABLE, implementation, current_device(), x, filter, **options)
    return chosen.run(x, filter, **options)


def explain(x: Any, filter: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(long_conv, device, x, filter, **options)
