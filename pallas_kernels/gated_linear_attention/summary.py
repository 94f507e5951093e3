"""What a stretch of a row does to the state that enters it, for sequences that are split over devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import count_documents, only_tokens


def gated_linear_attention_summary(
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H #K #V"], Float[Array, "B H K V"]]:
    """The decay over all steps and the state that they leave behind from zero, both fp32.

    Behind the stretch the state is decay * state + left. Where a document begins behind the row's first token the decay
    is zero. Stretches one after the other have decay_2 decay_1, and leave decay_2 left_1 + left_2. left is one product:
    the sum of k_t v_t^T, weighted by exp of the sum of log gates behind t.

    Arguments are as of `gated_linear_attention`.

    Returns:
      decay [B, H, 1, 1], [B, H, K, 1] or [B, H, 1, V], as the gate; left [B, H, K, V].
    """
    stays = None
    if segment_ids is not None:
        begun = count_documents(segment_ids)
        stays = begun[:, -1] == 0
        segment_ids = jnp.where(begun == begun[:, -1:], segment_ids, 0)
    by_key = log_key_gate is not None
    gate = log_key_gate if by_key else log_gate if log_value_gate is None else log_value_gate
    if gate is None:
        gate = jnp.zeros(v.shape[:3], accumulator(v.dtype))
    k, v, gate = (only_tokens(x, segment_ids) for x in (k, v, gate))
    decay, left = _sums(k, v, gate, by_key=by_key)
    if stays is not None:
        decay = jnp.where(stays[:, None, None, None], decay, jnp.zeros((), decay.dtype))
    return decay, left


def _sums(k: Array, v: Array, gate: Array, *, by_key: bool) -> tuple[Array, Array]:
    """Of one document, all of whose steps count. Backward makes the weighted array again."""
    (batch, length, key_heads, keys), heads, wide = k.shape, v.shape[2], accumulator(v.dtype)

    @jax.checkpoint
    def left(k: Array, v: Array, behind: Array) -> Array:
        weight = jnp.exp(behind)
        if by_key:
            k = (weight * k).astype(k.dtype)
        else:
            v = (weight.reshape(*v.shape[:3], -1) * v).astype(v.dtype)
        grouped = v.reshape(batch, length, key_heads, heads // key_heads, v.shape[3])
        return product("btjk,btjgv->bjgkv", k, grouped, v.dtype).reshape(batch, heads, keys, v.shape[3])

    sums = lax.cumsum(gate.astype(wide), 1, reverse=True)
    decay = jnp.exp(sums[:, 0])
    channels = (batch, heads, -1, 1) if by_key else (batch, heads, 1, -1)
    decay = (jnp.repeat(decay, heads // key_heads, 1) if by_key else decay).reshape(channels)
    return decay, left(k, v, jnp.pad(sums[:, 1:], ((0, 0), (0, 1), *((0, 0),) * (gate.ndim - 2))))
