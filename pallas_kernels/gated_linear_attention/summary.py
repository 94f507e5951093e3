"""What a stretch of a row does to the state that enters it, for sequences that are split over devices."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import count_documents, only_tokens
from pallas_kernels.gated_linear_attention.api import gated_linear_attention


def gated_linear_attention_summary(
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    implementation: Any = None,
) -> tuple[Float[Array, "B H #K #V"], Float[Array, "B H K V"]]:
    """The decay over all steps and the state that they leave behind from zero, both fp32.

    Behind the stretch the state is decay * state + left. Where a document begins behind the row's first token the decay
    is zero. Stretches one after the other have decay_2 decay_1, and leave decay_2 left_1 + left_2.

    Arguments are as of `gated_linear_attention`.

    Returns:
      decay [B, H, 1, 1], [B, H, K, 1] or [B, H, 1, V], as the gate; left [B, H, K, V].
    """
    gates = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    options = {"segment_ids": segment_ids, "chunk_size": chunk_size, "implementation": implementation}
    _, left = gated_linear_attention(k, k, v, **gates, **options, output_final_state=True)
    wide, group = accumulator(v.dtype), v.shape[2] // k.shape[2]

    def total(gate: Array) -> Array:
        return jnp.exp(jnp.sum(only_tokens(gate, segment_ids).astype(wide), 1))

    if log_key_gate is not None:
        decay = jnp.repeat(total(log_key_gate), group, axis=1)[..., None]
    elif log_value_gate is not None:
        decay = total(log_value_gate)[:, :, None]
    else:
        given = jnp.zeros(v.shape[:3], wide) if log_gate is None else log_gate
        decay = total(given)[..., None, None]
    if segment_ids is not None:
        stays = count_documents(segment_ids)[:, -1] == 0
        decay = jnp.where(stays[:, None, None, None], decay, jnp.zeros((), wide))
    return decay, left
