"""The definition, one tap at a time."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator


def short_conv_reference(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    history: Float[Array, "B D K-1"] | None = None,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
) -> Float[Array, "B D T"]:
    """Compute `short_conv` by its definition."""
    dtype = accumulator(x.dtype)
    batch, channels, length = x.shape
    past = taps.shape[1] - 1
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    token = ids[:, None] > 0

    def at_tokens(z: Array | None) -> Array:
        return jnp.ones((), dtype) if z is None else jnp.where(token, z.astype(dtype), 0)

    before = jnp.zeros((batch, channels, past), dtype) if history is None else history.astype(dtype)
    gated = jnp.where(token, at_tokens(pre_gate) * at_tokens(x), 0)
    u = jnp.concatenate([before, gated], -1)
    document = jnp.abs(jnp.concatenate([jnp.broadcast_to(ids[:, :1], (batch, past)), ids], 1))
    y = jnp.zeros((batch, channels, length), dtype)
    for k in range(past + 1):
        same = document[:, past - k : past - k + length] == document[:, past:]
        y += taps.astype(dtype)[:, k][None, :, None] * jnp.where(
            same[:, None], u[..., past - k : past - k + length], 0
        )
    if bias is not None:
        y += bias.astype(dtype)[None, :, None] * gated
    return jnp.where(token, at_tokens(post_gate) * y, 0).astype(x.dtype)
