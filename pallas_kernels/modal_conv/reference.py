"""The definition: one state per mode, one step per token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator


def modal_conv_reference(
    x: Float[Array, "B D T"],
    log_poles: Float[Array, "D M"],
    residues: Float[Array, "D M"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: Float[Array, "B D M"] | None = None,
    output_final_state: bool = False,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    chunk_size: int = 128,
) -> Float[Array, "B D T"] | tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
    """Compute `modal_conv` by its definition."""
    dtype = accumulator(x.dtype)
    ids = jnp.ones((x.shape[0], x.shape[2]), jnp.int32) if segment_ids is None else segment_ids
    token = ids[:, None] > 0

    def at_tokens(z: Array | None) -> Array:
        return jnp.ones((), dtype) if z is None else jnp.where(token, z.astype(dtype), 0)

    u = jnp.where(token, at_tokens(pre_gate) * at_tokens(x), 0)
    decay, weights = jnp.exp(log_poles.astype(dtype))[None], residues.astype(dtype)[None]
    # Multiply with u to tie the zeros to u's devices inside of shard_map, as a scan's carry must be.
    state = (
        jnp.zeros((), dtype) * (u[:, :, :1] * decay) if initial_state is None else initial_state.astype(dtype)
    )

    def step(carry: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (state, document), (u, id) = carry, now
        state = jnp.where((jnp.abs(id) != document)[:, None, None] & (id != 0)[:, None, None], 0, state)
        state = jnp.where((id != 0)[:, None, None], decay * state + u[..., None], state)
        return (state, jnp.where(id != 0, jnp.abs(id), document)), jnp.sum(weights * state, -1)

    start = (state, jnp.abs(ids[:, 0]))
    (final, _), y = lax.scan(step, start, (jnp.moveaxis(u, 2, 0), ids.T))
    y = jnp.moveaxis(y, 0, 2)
    if bias is not None:
        y += bias.astype(dtype)[None, :, None] * u
    y = jnp.where(token, at_tokens(post_gate) * y, 0).astype(x.dtype)
    return (y, final) if output_final_state else y
