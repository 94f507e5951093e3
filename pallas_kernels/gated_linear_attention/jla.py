"""Gated linear attention by the Hopper kernels of jax-linear-attention; see `_linear_state.jla`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import Device
from pallas_kernels._linear_state.jla import CHUNK, MOST_CHUNKS, call_jla, why_not_rows

WIDTHS = (64, 128)
"""Widths K and V of a head that the package has kernels for."""

GROUP = 128
"""Under gates by key channel, the package's kernels take so many channels of all heads at a time."""


def why_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    *,
    log_key_gate: Any = None,
    log_value_gate: Any = None,
    **_: Any,
) -> str | None:
    """Why the package's kernels cannot run such a call, or None."""
    if (reason := why_not_rows(device, q, k, v)) is not None:
        return reason
    if log_value_gate is not None:
        return "it has no gates by value channel"
    if k.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return f"it takes heads of K and V in {WIDTHS}, not {k.shape[3]} and {v.shape[3]}"
    return None if log_key_gate is None else _why_not_key_gates(k, v)


def _why_not_key_gates(k: Any, v: Any) -> str | None:
    length, key_heads, keys = k.shape[1:]
    if key_heads != v.shape[2]:
        return f"under gates by key channel it takes as many heads of k as of v, not {key_heads} and {v.shape[2]}"
    if key_heads * keys % GROUP:
        return f"under gates by key channel it takes multiples of {GROUP} channels, not {key_heads} heads of {keys}"
    if -(-length // CHUNK) * (keys // 64) > MOST_CHUNKS:
        longest = MOST_CHUNKS // (keys // 64) * CHUNK
        return f"under gates by key channel it takes at most {longest} steps a row, not {length}"
    return None


def gated_linear_attention_jla(
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
    scale: float = 1.0,
    chunk_size: int = 64,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """See `gated_linear_attention`; its chunks are of 64 steps."""
    gate = log_key_gate if log_gate is None else log_gate
    return call_jla(
        "simple_gla" if log_key_gate is None else "gla",
        *(q, k, v),
        log_gate=jnp.zeros(v.shape[:3], jnp.float32) if gate is None else gate,
        segment_ids=segment_ids,
        initial_state=initial_state,
        output_final_state=output_final_state,
        scale=scale,
    )
