"""Gated linear attention by the Hopper kernels of jax-linear-attention; see `_linear_state.jla`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._dispatch import Device
from pallas_kernels._linear_state import jla
from pallas_kernels._linear_state.jla import CHUNK, MOST_CHUNKS, call_jla, why_not_rows
from pallas_kernels.gated_linear_attention.pieces import Pieces


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
    """Return why the package's kernels cannot run such a call, or None."""
    if (reason := why_not_rows(device, q, k, v)) is not None:
        return reason
    if log_value_gate is not None:
        return "it has no gates by value channel"
    if log_key_gate is None:
        return None
    length, width = v.shape[1], Pieces.of(k, v, by_key=True).key_width
    if -(-length // CHUNK) * (width // 64) > MOST_CHUNKS:
        longest = MOST_CHUNKS // (width // 64) * CHUNK
        return f"under gates by key channel it takes at most {longest} steps a row, not {length}"
    return None


def rather_not(
    device: Device, q: Any, k: Any, v: Any, *, log_key_gate: Any = None, **options: Any
) -> str | None:
    """Return why a call is left to others, or None."""
    if (refused := jla.rather_not(device, q, k, v, log_key_gate, **options)) is not None:
        return refused
    (key_heads, keys), (heads, values) = k.shape[2:], v.shape[2:]
    # Accept cut and filled heads under gates by key channel, which were timed (`gated_linear_attention_cut.json`).
    by_key = log_key_gate is not None
    if (by_key and key_heads == heads) or Pieces.of(k, v, by_key=by_key).is_whole:
        return None
    return (
        f"{heads} heads of K {keys} and V {values} with {key_heads} of keys would be cut, filled up or repeated, which "
        "was not timed"
    )


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
    """Compute `gated_linear_attention` by the package.

    Its chunks are of 64 steps, its heads of 64 or 128 channels.
    """
    pieces = Pieces.of(k, v, by_key=log_key_gate is not None)
    if log_key_gate is not None:
        kind, gate = "gla", pieces.of_keys(log_key_gate)
    else:
        kind = "simple_gla"
        gate = pieces.of_heads(jnp.zeros(v.shape[:3], jnp.float32) if log_gate is None else log_gate)
    found: Any = call_jla(
        kind,
        *(pieces.of_keys(q), pieces.of_keys(k), pieces.of_values(v)),
        log_gate=gate,
        segment_ids=segment_ids,
        initial_state=None if initial_state is None else pieces.of_states(initial_state),
        output_final_state=output_final_state,
        scale=scale,
    )
    if not output_final_state:
        return pieces.outputs(found, v.shape[3])
    o, final = found
    return pieces.outputs(o, v.shape[3]), pieces.states(final, k.shape[3], v.shape[3])
