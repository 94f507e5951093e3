"""The public function and its implementation table."""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._conv.gates import check_floats, check_shape, check_streams
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import check_documents
from pallas_kernels.short_conv.hopper import why_not
from pallas_kernels.short_conv.reference import short_conv_reference
from pallas_kernels.short_conv.triton_why import why_not as why_not_triton
from pallas_kernels.short_conv.xla import short_conv_xla


def _mosaic_gpu(*args: Any, **options: Any) -> Array:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.short_conv.mosaic_gpu import short_conv_mosaic_gpu

    return short_conv_mosaic_gpu(*args, **options)


def _triton(*args: Any, **options: Any) -> Array:
    """Import the kernel where it runs, as many machines lack Triton."""
    from pallas_kernels.short_conv.triton_gpu import short_conv_triton

    return short_conv_triton(*args, **options)


TABLE = (
    Implementation("triton", _triton, why_not_triton),
    Implementation("mosaic_gpu", _mosaic_gpu, why_not),
    Implementation("xla", short_conv_xla),
    Implementation("reference", short_conv_reference),
)
"""Implementations of the operation, fastest first."""


@checked
def short_conv(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    history: Float[Array, "B D K-1"] | None = None,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    implementation: Literal["triton", "mosaic_gpu", "xla", "reference"] | None = None,
) -> Float[Array, "B D T"]:
    """Convolve causally and depthwise with a few taps (3 to 7), its gates fused.

    y_t = post_gate_t * (sum_k taps_k u_{t-k} + bias u_t), with u = pre_gate * x, summed in fp32.

    Args:
      x: inputs, channel-major.
      taps: K taps per channel, that of lag 0 first.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous. Nothing
        crosses from one to another; holes and padding count as time, their input as zero, their output is zero.
      history: u at the K - 1 steps before x, oldest first; they belong to the document of the first step.
      bias: the skip connection, one weight per channel.
      pre_gate: multiplies the input.
      post_gate: multiplies the output.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y, in x's dtype.

    Raises:
      ValueError: shapes that do not fit, or an implementation that is unknown or cannot run here.

    Source: the short filter of Hyena (Poli et al. 2023, arXiv:2302.10866, sec. 3).
    """
    check_streams("short_conv", x, segment_ids, bias, pre_gate, post_gate)
    _check_taps(x, taps, history)
    check_documents(segment_ids, op="short_conv")
    options = {
        "segment_ids": segment_ids,
        "history": history,
        "bias": bias,
        "pre_gate": pre_gate,
        "post_gate": post_gate,
    }
    chosen = choose("short_conv", TABLE, implementation, current_device(), x, taps, **options)
    return chosen.run(x, taps, **options)


def _check_taps(x: Any, taps: Any, history: Any) -> None:
    if taps.ndim != 2 or taps.shape[0] != x.shape[1] or taps.shape[1] < 1:
        raise ValueError(
            f"short_conv: taps must be [{x.shape[1]} channels, at least 1 tap], got shape {taps.shape}"
        )
    check_floats("short_conv", taps=taps, history=history)
    check_shape("short_conv", "history", history, (*x.shape[:2], taps.shape[1] - 1))


def explain(x: Any, taps: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(short_conv, device, x, taps, **options)
