"""What a stretch of a row does to the state that enters it, for sequences that are split over devices."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator
from pallas_kernels.gated_delta_rule.api import gated_delta_rule


def gated_delta_rule_summary(
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    chunk_size: int = 64,
    implementation: Any = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """The transition over all steps and the state that they leave behind from zero, both fp32.

    Behind the stretch the state is transition @ state + left. Where a document begins behind the row's first token the
    transition is zero. Stretches one after the other have P_2 P_1, and leave P_2 left_1 + left_2. The transition is
    what becomes of a state of I when all values are zero: K more columns of the state.

    Arguments are as of `gated_delta_rule`.

    Returns:
      transition [B, H, K, K] and left [B, H, K, V].
    """
    (batch, _, heads, values), keys, wide = v.shape, k.shape[3], accumulator(v.dtype)
    beside = jnp.zeros((*v.shape[:3], keys), v.dtype)
    start = jnp.concatenate([jnp.zeros((keys, values), wide), jnp.eye(keys, dtype=wide)], 1)
    _, final = gated_delta_rule(
        *(k, k, jnp.concatenate([v, beside], -1), beta),
        log_gate=log_gate,
        segment_ids=segment_ids,
        initial_state=jnp.broadcast_to(start, (batch, heads, *start.shape)),
        output_final_state=True,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return final[..., values:], final[..., :values]
