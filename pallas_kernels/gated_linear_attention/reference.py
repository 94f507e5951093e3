"""The definition: one step after another."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import count_documents, only_tokens


def gated_linear_attention_reference(
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
    """Compute `gated_linear_attention` by its definition.

    It has derivatives of any order, forward mode too.
    """
    (batch, length, heads, values), keys, group = v.shape, k.shape[3], v.shape[2] // k.shape[2]
    wide = accumulator(v.dtype)

    def steps(x: Array, repeat: int = 1) -> Array:
        x = jnp.repeat(only_tokens(x, segment_ids).astype(wide), repeat, axis=2)
        return jnp.moveaxis(x, 1, 0)

    if log_key_gate is not None:
        gate = steps(log_key_gate, group)[..., None]
    elif log_value_gate is not None:
        gate = steps(log_value_gate)[..., None, :]
    else:
        given = jnp.zeros(v.shape[:3], wide) if log_gate is None else log_gate
        gate = steps(given)[..., None, None]
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    begins = jnp.diff(count_documents(ids), axis=1, prepend=0) > 0

    def step(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, gate, begins = now
        state = jnp.where(begins[:, None, None, None], 0, state)
        state = jnp.exp(gate) * state + k[..., None] * v[..., None, :]
        return state, scale * jnp.sum(q[..., None] * state, -2)

    start = jnp.zeros((batch, heads, keys, values), wide) if initial_state is None else initial_state
    start, *xs = vary_alike(
        start.astype(wide), steps(q, group), steps(k, group), steps(v), gate, jnp.moveaxis(begins, 1, 0)
    )
    final, o = lax.scan(step, start, tuple(xs))
    o = jnp.moveaxis(o, 0, 1).astype(v.dtype)
    return (o, final) if output_final_state else o
