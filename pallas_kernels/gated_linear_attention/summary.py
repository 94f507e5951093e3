"""The effect of a stretch of a row on the state that enters it, for sequences that are split over devices."""

from functools import partial

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
    """Return the decay over all steps, and the state that they leave from zero, both fp32.

    Behind the stretch the state is decay * state + left. Where a document begins behind the row's first token the decay
    is zero. Stretches one after the other have decay_2 decay_1, and leave decay_2 left_1 + left_2. left is one product:
    the sum of k_t v_t^T, weighted by exp of the sum of log gates behind t.

    Arguments are as of `gated_linear_attention`.

    Returns:
      decay [B, H, 1, 1], [B, H, K, 1] or [B, H, 1, V], as the gate; left [B, H, K, V].
    """
    last, stays = _document(segment_ids, last=True)
    k, v, gate, by_key = _of_tokens(k, v, last, log_gate, log_key_gate, log_value_gate)
    sums = lax.cumsum(gate, 1, reverse=True)
    left = _weighted(k, v, jnp.pad(sums[:, 1:], ((0, 0), (0, 1), *((0, 0),) * (gate.ndim - 2))), by_key)
    return _through(sums[:, 0], stays, left, by_key), left


def gated_linear_attention_adjoint(
    q: Float[Array, "B T J K"],
    do: Float[Array, "B T H V"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    log_key_gate: Float[Array, "B T J K"] | None = None,
    log_value_gate: Float[Array, "B T H V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B H #K #V"], Float[Array, "B H K V"]]:
    """Return what a stretch does to the gradient by the state behind it, both fp32.

    Before the stretch it is decay * gradient + read. decay is that of `gated_linear_attention_summary`. read is what
    outputs with the cotangents do say of the state that enters: the sum of q_t do_t^T over its document, weighted by
    exp of the sum of log gates up to t, and `scale`.

    Arguments are as of `gated_linear_attention`.

    Returns:
      decay [B, H, 1, 1], [B, H, K, 1] or [B, H, 1, V], as the gate; read [B, H, K, V].
    """
    first, stays = _document(segment_ids, last=False)
    q, do, gate, by_key = _of_tokens(q, do, first, log_gate, log_key_gate, log_value_gate)
    sums = lax.cumsum(gate, 1)
    read = _weighted(q, do, sums, by_key)
    decay = _through(sums[:, -1], stays, read, by_key)
    return decay, (q.shape[3] ** -0.5 if scale is None else scale) * read


def _document(segment_ids: Array | None, *, last: bool) -> tuple[Array | None, Array | None]:
    """Return ids of only each row's first or last document, and whether no other begins in it."""
    if segment_ids is None:
        return None, None
    begun = count_documents(segment_ids)
    return jnp.where(begun == (begun[:, -1:] if last else 0), segment_ids, 0), begun[:, -1] == 0


def _of_tokens(
    k: Array, v: Array, ids: Array | None, head: Array | None, key: Array | None, value: Array | None
) -> tuple[Array, Array, Array, bool]:
    """Return k, v and the wide gate, zero where `ids` have no token.

    Also returns whether the gate is of key channels.
    """
    wide = accumulator(v.dtype)
    given = [gate for gate in (head, key, value) if gate is not None]
    gate = given[0].astype(wide) if given else jnp.zeros(v.shape[:3], wide)
    k, v, gate = (only_tokens(x, ids) for x in (k, v, gate))
    return k, v, gate, key is not None


@partial(jax.checkpoint, static_argnums=3)
def _weighted(k: Array, v: Array, sums: Array, by_key: bool) -> Array:
    """Return the sum over time of exp(sums) k v^T, [B, H, K, V].

    Backward makes the weighted array again.
    """
    (batch, length, key_heads, keys), (_, _, heads, values) = k.shape, v.shape
    weight = jnp.exp(sums)
    if by_key:
        k = (weight * k.astype(weight.dtype)).astype(k.dtype)
    else:
        v = (weight.reshape(*v.shape[:3], -1) * v.astype(weight.dtype)).astype(v.dtype)
    grouped = v.reshape(batch, length, key_heads, heads // key_heads, values)
    return product("btjk,btjgv->bjgkv", k, grouped, v.dtype).reshape(batch, heads, keys, values)


def _through(total: Array, stays: Array | None, state: Array, by_key: bool) -> Array:
    """Return what all steps multiply a state by, from the sum of their log gates.

    It is zero in rows where the state does not stay.
    """
    decay, (batch, heads, *_) = jnp.exp(total), state.shape
    if by_key:
        decay = jnp.repeat(decay, heads // decay.shape[1], 1)
    decay = decay.reshape((batch, heads, -1, 1) if by_key else (batch, heads, 1, -1))
    if stays is None:
        return decay
    return jnp.where(stays[:, None, None, None], decay, jnp.zeros((), decay.dtype))
