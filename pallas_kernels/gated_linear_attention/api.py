"""The public function and its implementation table."""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._linear_state import step
from pallas_kernels._linear_state.checks import LOG_GATE, check_gates, check_heads, check_rows
from pallas_kernels._ranges import check_values
from pallas_kernels.gated_linear_attention import hopper, jla, stretches
from pallas_kernels.gated_linear_attention.reference import gated_linear_attention_reference
from pallas_kernels.gated_linear_attention.xla import gated_linear_attention_xla

OP = "gated_linear_attention"


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.gated_linear_attention.mosaic_gpu import gated_linear_attention_mosaic_gpu

    return gated_linear_attention_mosaic_gpu(*args, **options)


def _mosaic_gpu_stretches(*args: Any, **options: Any) -> Any:
    return stretches.in_stretches(_mosaic_gpu, *args, **options | {"chunk_size": hopper.PIECE})


def _mosaic_gpu_step(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.gated_linear_attention.mosaic_gpu_step import gated_linear_attention_step

    return gated_linear_attention_step(*args, **options)


TABLE = (
    Implementation("jla", jla.gated_linear_attention_jla, jla.why_not, jla.rather_not),
    Implementation("mosaic_gpu_stretches", _mosaic_gpu_stretches, stretches.why_not, stretches.rather_not),
    Implementation("mosaic_gpu", _mosaic_gpu, hopper.why_not, hopper.rather_not),
    Implementation("mosaic_gpu_step", _mosaic_gpu_step, step.why_not),
    Implementation("xla", gated_linear_attention_xla),
    Implementation("reference", gated_linear_attention_reference),
)
"""Implementations of the operation, fastest first."""

RANGES = {"log_gate": LOG_GATE, "log_key_gate": LOG_GATE, "log_value_gate": LOG_GATE}
"""The ranges of arguments."""


@checked
def gated_linear_attention(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float | None = None,
    chunk_size: int = 64,
    implementation: Literal[
        "jla", "mosaic_gpu_stretches", "mosaic_gpu", "mosaic_gpu_step", "xla", "reference"
    ]
    | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Attend linearly with a gated matrix of state per head, in linear time.

    S_t = A_t * S_{t-1} + k_t v_t^T,  o_t = scale S_t^T q_t, elementwise in A_t, which has the shape of S and is
    exp(log_gate_t) throughout, exp(log_key_gate_t) in each column or exp(log_value_gate_t) in each row.

    Args:
      q: queries. Their J heads, and those of the keys, are shared by groups of H / J neighbouring heads of v.
      k: keys.
      v: values.
      log_gate: logarithm of one gate per head, at most 0 (Mamba-2, fixed decays). -inf forgets everything.
      log_key_gate: of one gate per key channel and key head (gated linear attention, reading of slots).
      log_value_gate: of one gate per value channel (writing to slots). At most one of the three is given; without any
        nothing is forgotten.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous and start anywhere,
        each from a state of zero. Holes and padding write nothing, let nothing decay, are not read (NaN may lie there)
        and have an output of zero.
      initial_state: S before the first step, of the row's first document; zero if None.
      output_final_state: return S behind the last step, of the row's last document, in fp32.
      scale: of the outputs; K**-0.5 if None. Mamba-2 and slots take 1.
      chunk_size: steps per chunk, a power of two; the result does not depend on it.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      o in v's dtype, or (o, final state). For bf16 inputs products take bf16 operands and sum in fp32; states are fp32
      (f64 for f64).

    Raises:
      ValueError: arrays that do not fit, values out of their ranges, two gates, or an implementation that is unknown.

    Source: Yang et al. 2023 (arXiv:2312.06635, sec. 4); Dao and Gu 2024 (arXiv:2405.21060, sec. 6); Zhang et al. 2024
    (arXiv:2409.07146, sec. 3) for slots.
    """
    check_heads(OP, q, k, v)
    check_rows(OP, v, segment_ids, chunk_size)
    check_one_gate(log_gate, log_key_gate, log_value_gate)
    expected = {
        "log_gate": (log_gate, v.shape[:3]),
        "log_key_gate": (log_key_gate, k.shape),
        "log_value_gate": (log_value_gate, v.shape),
        "initial_state": (initial_state, (v.shape[0], v.shape[2], k.shape[3], v.shape[3])),
    }
    check_gates(OP, expected)
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    check_values(OP, RANGES, gates, segment_ids=segment_ids)
    options = {
        **gates,
        "segment_ids": segment_ids,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "scale": k.shape[3] ** -0.5 if scale is None else scale,
        "chunk_size": chunk_size,
    }
    chosen = choose(OP, TABLE, implementation, current_device(), q, k, v, **options)
    return chosen.run(q, k, v, **options)


def check_one_gate(log_gate: Any, log_key_gate: Any, log_value_gate: Any) -> None:
    """Raise ValueError if more than one gate is given."""
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    given = [name for name, gate in gates.items() if gate is not None]
    if len(given) > 1:
        raise ValueError(
            f"{OP}: at most one gate can act, got {' and '.join(given)}: add one to the other first"
        )


def explain(q: Any, k: Any, v: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(gated_linear_attention, device, q, k, v, **options)
