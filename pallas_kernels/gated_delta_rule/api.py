"""The public function and its implementation table."""

from typing import Any, Literal

from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._linear_state import step
from pallas_kernels._linear_state.checks import LOG_GATE, check_gates, check_heads, check_rows
from pallas_kernels._linear_state.jla import rather_not
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.gated_delta_rule.jla import gated_delta_rule_jla, why_not
from pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from pallas_kernels.gated_delta_rule.xla import gated_delta_rule_xla

OP = "gated_delta_rule"


def _mosaic_gpu_step(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.gated_delta_rule.mosaic_gpu_step import gated_delta_rule_step

    return gated_delta_rule_step(*args, **options)


TABLE = (
    Implementation("jla", gated_delta_rule_jla, why_not, rather_not),
    Implementation("mosaic_gpu_step", _mosaic_gpu_step, step.why_not),
    Implementation("xla", gated_delta_rule_xla),
    Implementation("reference", gated_delta_rule_reference),
)
"""Implementations of the operation, fastest first."""

RANGES = {"beta": Range(0, 2, "pass sigmoid(x), or twice that", per_token=True), "log_gate": LOG_GATE}
"""The ranges of arguments."""


@checked
def gated_delta_rule(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float | None = None,
    chunk_size: int = 64,
    implementation: Literal["jla", "mosaic_gpu_step", "xla", "reference"] | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Attend linearly, replacing what the state holds at a key, in linear time.

    S_t = exp(log_gate_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,  o_t = scale S_t^T q_t.

    Args:
      q: queries. Their J heads, and those of the keys, are shared by groups of H / J neighbouring heads of v.
      k: keys. None is normalised here: states stay bounded where beta |k|^2 is at most 2.
      v: values.
      beta: how much of the state at a key is replaced, in 0..2: 0 nothing, 1 all of it, 2 a reflection.
      log_gate: logarithm of a gate per head, at most 0; nothing is forgotten if None. -inf forgets everything.
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 padding. Documents are contiguous and start anywhere,
        each from a state of zero. Holes and padding write nothing, let nothing decay, are not read (NaN may lie there)
        and have an output of zero.
      initial_state: S before the first step, of the row's first document; zero if None.
      output_final_state: return S behind the last step, of the row's last document, in fp32.
      scale: of the outputs; K**-0.5 if None.
      chunk_size: steps per chunk, a power of two; the result does not depend on it.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      o in v's dtype, or (o, final state). For bf16 inputs products take bf16 operands and sum in fp32; states are fp32
      (f64 for f64).

    Raises:
      ValueError: arrays that do not fit, values out of their ranges, or an implementation that is unknown.

    Source: Yang et al. 2024 (arXiv:2412.06464, sec. 3) with the chunks of Yang et al. 2024 (arXiv:2406.06484, sec. 3).
    """
    check_heads(OP, q, k, v)
    check_rows(OP, v, segment_ids, chunk_size)
    expected = {
        "beta": (beta, v.shape[:3]),
        "log_gate": (log_gate, v.shape[:3]),
        "initial_state": (initial_state, (v.shape[0], v.shape[2], k.shape[3], v.shape[3])),
    }
    check_gates(OP, expected)
    check_values(OP, RANGES, {"beta": beta, "log_gate": log_gate}, segment_ids=segment_ids)
    options = {
        "log_gate": log_gate,
        "segment_ids": segment_ids,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "scale": k.shape[3] ** -0.5 if scale is None else scale,
        "chunk_size": chunk_size,
    }
    chosen = choose(OP, TABLE, implementation, current_device(), q, k, v, beta, **options)
    return chosen.run(q, k, v, beta, **options)


def explain(q: Any, k: Any, v: Any, beta: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(gated_delta_rule, device, q, k, v, beta, **options)
