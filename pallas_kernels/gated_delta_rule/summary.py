"""The effect of a stretch of a row on the state that enters it, for sequences that are split over devices."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels.gated_delta_rule.api import gated_delta_rule


def gated_delta_rule_summary(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    implementation: Any = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"], Float[Array, "B T H K"]]:
    """Return the transition over all steps, the state left from zero, and what reads a state.

    Behind the stretch the state is transition @ state + left, and its outputs are those from zero + state^T reads.
    Where a document begins behind the row's first token the transition is zero, and so are the reads from there on.
    Stretches one after the other have P_2 P_1, and leave P_2 left_1 + left_2. Transition and reads are the state and
    the outputs from a state of I when all values are zero: K more columns of the state.

    Arguments are as of `gated_delta_rule`.

    Returns:
      transition [B, H, K, K] and left [B, H, K, V] in fp32, reads [B, T, H, K] in v's dtype.
    """
    (batch, _, heads, values), keys, wide = v.shape, k.shape[3], accumulator(v.dtype)
    beside = jnp.zeros((*v.shape[:3], keys), v.dtype)
    start = jnp.concatenate([jnp.zeros((keys, values), wide), jnp.eye(keys, dtype=wide)], 1)
    o, final = gated_delta_rule(
        *(q, k, jnp.concatenate([v, beside], -1), beta),
        log_gate=log_gate,
        segment_ids=segment_ids,
        initial_state=jnp.broadcast_to(start, (batch, heads, *start.shape)),
        output_final_state=True,
        scale=scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return final[..., values:], final[..., :values], o[..., values:]


def gated_delta_rule_adjoint(
    transition: Float[Array, "B H K K"],
    reads: Float[Array, "B T H K"],
    do: Float[Array, "B T H V"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """Return what a stretch does to the gradient by the state behind it, both fp32.

    Before the stretch it is back @ gradient + read. back is the transition, transposed. read is what outputs with the
    cotangents do say of the state that enters: the sum of reads_t do_t^T.

    Args:
      transition: of `gated_delta_rule_summary`.
      reads: of `gated_delta_rule_summary`.
      do: cotangents of the outputs.
      segment_ids: as of `gated_delta_rule`.

    Returns:
      back [B, H, K, K] and read [B, H, K, V].
    """
    do = only_tokens(do, segment_ids)
    return jnp.swapaxes(transition, 2, 3), product("bthk,bthv->bhkv", reads, do, do.dtype)
