"""The definition: one dense matrix per channel, masked by document. Cost and memory O(T^2)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator


def conv_reference(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
) -> Float[Array, "B D T"]:
    """Return y_t = post_t (sum_s h[t - s] u_s + bias u_t), u = pre * x, over s of t's document."""
    dtype = accumulator(x.dtype)
    batch, _, length = x.shape
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    token = ids[:, None] > 0

    def at_tokens(z: Array | None) -> Array:
        return jnp.ones((), dtype) if z is None else jnp.where(token, z.astype(dtype), 0)

    u = jnp.where(token, at_tokens(pre_gate) * at_tokens(x), 0)
    lag = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    tap = lag if causal else lag + (filter.shape[1] - 1) // 2
    inside = (tap >= 0) & (tap < filter.shape[1])
    taps = filter.astype(dtype)[:, jnp.clip(tap, 0, filter.shape[1] - 1)]
    matrix = jnp.where(inside[None], taps, 0)
    same = jnp.abs(ids)[:, :, None] == jnp.abs(ids)[:, None]
    y = jnp.einsum("dts,bts,bds->bdt", matrix, same.astype(dtype), u, precision=lax.Precision.HIGHEST)
    if bias is not None:
        y += bias.astype(dtype)[None, :, None] * u
    return jnp.where(token, at_tokens(post_gate) * y, 0).astype(x.dtype)
