"""The gated delta rule by the Hopper kernels of jax-linear-attention; see `_linear_state.jla`."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import Device
from pallas_kernels._linear_state.jla import call_jla, why_not_rows

WIDTHS = frozenset(
    [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256), (256, 512)]
)
"""Widths (K, V) of a head that the package has kernels for."""


def why_not(device: Device, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> str | None:
    """Return why the package's kernels cannot run such a call, or None."""
    if (reason := why_not_rows(device, q, k, v)) is not None:
        return reason
    if (widths := (k.shape[3], v.shape[3])) not in WIDTHS:
        return f"it takes heads of K, V in {sorted(WIDTHS)}, not {widths}"
    return None


def gated_delta_rule_jla(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Compute `gated_delta_rule` by the package; its chunks are of 64 steps."""
    return call_jla(
        "deltanet" if log_gate is None else "gated_deltanet",
        *(q, k, v),
        beta=beta,
        log_gate=log_gate,
        segment_ids=segment_ids,
        initial_state=initial_state,
        output_final_state=output_final_state,
        scale=scale,
    )
