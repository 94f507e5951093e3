"""What a stretch of a row does to the state that enters it, for sequences that are split over devices."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import only_tokens
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


def gated_delta_rule_adjoint(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    beta: Float[Array, "B T H"],
    do: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    implementation: Any = None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """What a stretch does to the gradient by the state behind it, both fp32.

    Before the stretch it is back @ gradient + read. back is the transition of `gated_delta_rule_summary`, transposed.
    read is what outputs with the cotangents do say of the state that enters: the sum of r_t do_t^T, where r_t are
    outputs from a state of I when all values are zero.

    Arguments are as of `gated_delta_rule`.

    Returns:
      back [B, H, K, K] and read [B, H, K, V].
    """
    (batch, _, heads, _), keys, wide = do.shape, k.shape[3], accumulator(do.dtype)
    r, transition = gated_delta_rule(
        *(q, k, jnp.zeros((*do.shape[:3], keys), do.dtype), beta),
        log_gate=log_gate,
        segment_ids=segment_ids,
        initial_state=jnp.broadcast_to(jnp.eye(keys, dtype=wide), (batch, heads, keys, keys)),
        output_final_state=True,
        scale=scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    do = only_tokens(do, segment_ids)
    return jnp.swapaxes(transition, 2, 3), product("bthk,bthv->bhkv", r, do, do.dtype)
