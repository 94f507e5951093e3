"""The public function and its implementation table."""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._conv.gates import check_alignment, check_floats, check_shape, check_streams
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.modal_conv.hopper import why_not
from pallas_kernels.modal_conv.reference import modal_conv_reference
from pallas_kernels.modal_conv.xla import modal_conv_xla


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.modal_conv.mosaic_gpu import modal_conv_mosaic_gpu

    return modal_conv_mosaic_gpu(*args, **options)


TABLE = (
    Implementation("mosaic_gpu", _mosaic_gpu, why_not),
    Implementation("xla", modal_conv_xla),
    Implementation("reference", modal_conv_reference),
)
"""Implementations of the operation, fastest first."""

RANGES = {"log_poles": Range(most=0, fix="pass -exp(x) or -softplus(x)", finite=False), "residues": Range()}
"""The ranges of arguments."""


@checked
def modal_conv(
    x: Float[Array, "B D T"],
    log_poles: Float[Array, "D M"],
    residues: Float[Array, "D M"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: Float[Array, "B D M"] | None = None,
    output_final_state: bool = False,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    chunk_size: int = 128,
    implementation: Literal["xla", "mosaic_gpu", "reference"] | None = None,
) -> Float[Array, "B D T"] | tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
    """Convolve causally and depthwise with a sum of exponentials, in linear time.

    The state has a fixed size. h_t = sum_m residues_m exp(t log_poles_m),  y_t = post_gate_t * (sum_{s <= t} h_{t-s}
    u_s + bias u_t) with u = pre_gate * x, over the s of t's own document; or, step by step, s_m <- exp(log_poles_m) s_m
    + u_t,  y_t = post_gate_t * (sum_m residues_m s_m + bias u_t).

    Args:
      x: inputs, channel-major.
      log_poles: logarithm of each mode's decay per step, at most 0.
      residues: weight of each mode.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous. Nothing
        crosses from one to another; a hole counts as time, its input as zero, its output is zero. Padding, at the
        end of a row or between documents, changes no state and its output is zero.
      segment_alignment: the caller's promise that documents start at multiples of it. A multiple of chunk_size is
        fastest.
      initial_state: s before the first step, of that step's document; zero if None.
      output_final_state: return s after the row's last step that is no padding, of its document, in fp32.
      bias: the skip connection, one weight per channel.
      pre_gate: multiplies the input.
      post_gate: multiplies the output.
      chunk_size: steps per chunk, a power of two from 16 on; the result does not depend on it.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y in x's dtype, or (y, final state). In bf16 the products inside a chunk take bf16 operands and sum in fp32;
      states are fp32 throughout.

    Raises:
      ValueError: shapes that do not fit, or an implementation that is unknown or cannot run here.

    Source: modal filters as in Massaroli et al. 2023 (arXiv:2310.18780, sec. 3), computed by chunks as in Dao and Gu
    2024 (arXiv:2405.21060, sec. 6).
    """
    check_streams("modal_conv", x, segment_ids, bias, pre_gate, post_gate)
    check_alignment("modal_conv", segment_alignment)
    _check_modes(x, log_poles, residues, initial_state)
    modes = {"log_poles": log_poles, "residues": residues}
    check_values("modal_conv", RANGES, modes, segment_ids=segment_ids, alignment=segment_alignment)
    if chunk_size < 16 or chunk_size & (chunk_size - 1):
        raise ValueError(f"modal_conv: chunk_size must be a power of two, at least 16, got {chunk_size}")
    options = {
        "segment_ids": segment_ids,
        "segment_alignment": segment_alignment,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "bias": bias,
        "pre_gate": pre_gate,
        "post_gate": post_gate,
        "chunk_size": chunk_size,
    }
    chosen = choose("modal_conv", TABLE, implementation, current_device(), x, log_poles, residues, **options)
    return chosen.run(x, log_poles, residues, **options)


def _check_modes(x: Any, log_poles: Any, residues: Any, initial_state: Any) -> None:
    if log_poles.ndim != 2 or log_poles.shape[0] != x.shape[1] or log_poles.shape[1] < 1:
        raise ValueError(
            f"modal_conv: log_poles must be [{x.shape[1]} channels, modes], got {log_poles.shape}"
        )
    check_floats("modal_conv", log_poles=log_poles, residues=residues, initial_state=initial_state)
    check_shape("modal_conv", "residues", residues, log_poles.shape)
    check_shape("modal_conv", "initial_state", initial_state, (x.shape[0], *log_poles.shape))


def explain(x: Any, log_poles: Any, residues: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(modal_conv, device, x, log_poles, residues, **options)
