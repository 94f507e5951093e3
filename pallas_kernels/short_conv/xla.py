"""Shifted products that XLA fuses with both gates: one pass over memory."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels._conv.shifted import shifted_products


def short_conv_xla(
    x: Float[Array, "B D T"],
    taps: Float[Array, "D K"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    history: Float[Array, "B D K-1"] | None = None,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
) -> Float[Array, "B D T"]:
    """Compute `short_conv` by XLA."""
    u = enter(x, pre_gate, segment_ids)
    documents = None if segment_ids is None else jnp.abs(segment_ids)
    past = 0 if history is None else history.shape[-1]
    if history is not None:
        u = jnp.concatenate([history.astype(u.dtype), u], -1)
    if past and documents is not None:
        first = jnp.broadcast_to(documents[:, :1], (documents.shape[0], past))
        documents = jnp.concatenate([first, documents], 1)
    y = shifted_products(u, add_skip(taps.astype(accumulator(x.dtype)), bias, 0), documents)
    return leave(y[..., past:], post_gate, segment_ids, x.dtype)
