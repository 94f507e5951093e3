"""Chunks: a triangular matrix is inverted inside of each, and a state carried from one to the next."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.chunks import fit_chunk, into_chunks, numbers_into_chunks, out_of_chunks
from pallas_kernels._linear_state.decays import pair_decays, sum_gates
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import Documents, count_documents, only_tokens
from pallas_kernels.gated_delta_rule.inverse import unit_lower_inverse
from pallas_kernels.gated_delta_rule.states import carry_states


def gated_delta_rule_xla(
    q: Float[Array, "B T J K"],
    k: Float[Array, "B T J K"],
    v: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    *,
    log_gate: Float[Array, "B T H"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Compute `gated_delta_rule` by XLA."""
    (batch, length, heads, values), (_, _, key_heads, keys) = v.shape, k.shape
    wide, grouped = accumulator(v.dtype), (batch, length, key_heads, heads // key_heads)
    gate = jnp.zeros(v.shape[:3], wide) if log_gate is None else log_gate
    state = jnp.zeros((batch, heads, keys, values), wide) if initial_state is None else initial_state
    state = state.astype(wide).reshape(batch, *grouped[2:], keys, values)
    numbers = None if segment_ids is None else count_documents(segment_ids)
    rows = (q, k, v.reshape(*grouped, values), beta.reshape(grouped), gate.reshape(grouped))
    arrays = vary_alike(*(only_tokens(x, segment_ids) for x in rows), state, numbers)
    o, final = _chunked(*arrays, fit_chunk(length, chunk_size))
    o = only_tokens((scale * o).reshape(v.shape).astype(v.dtype), segment_ids)
    final = final.reshape(batch, heads, keys, values)
    return (o, final) if output_final_state else o


@partial(jax.checkpoint, static_argnums=7)
def _chunked(
    q: Array, k: Array, v: Array, beta: Array, gate: Array, state: Array, numbers: Array | None, chunk: int
) -> tuple[Array, Array]:
    """Run chunks.

    It is rematerialised: backward keeps the inputs and no state.

    Args:
      v: [B, T, J, G, V].
      beta, gate: [B, T, J, G].
      state: [B, J, G, K, V].
    """
    length, dtype = v.shape[1], v.dtype
    q, k, v, beta, gate = (into_chunks(x.astype(state.dtype), chunk) for x in (q, k, v, beta, gate))
    documents = Documents(None if numbers is None else numbers_into_chunks(numbers, chunk))
    sums = sum_gates(gate)
    entered, left = (jnp.exp(x) for x in sums[-1])
    decay = documents.carrying(entered[:, :, :, -1])
    entered, left = documents.reading(entered), documents.writing(left)
    # Put heads before time: all that follows is a product of matrices for each head.
    v, beta, entered, left = (jnp.moveaxis(x, 3, 4) for x in (v, beta, entered, left))
    decays = documents.within(pair_decays(sums))

    similar = product("nbjck,nbjdk->nbjcd", k, k, dtype)[:, :, :, None]
    solved = unit_lower_inverse(jnp.tril(beta[..., None] * decays * similar, -1)) * beta[..., None, :]
    offered = product("nbjgcd,nbjgdv->nbjgcv", solved, v, dtype)
    reading = product("nbjgcd,nbjdk->nbjgck", solved * entered[..., None, :], k, dtype)
    writing = left[..., None] * k[:, :, :, None]
    entering, new, final = carry_states(decay, reading, offered, writing, state, dtype)

    scores = product("nbjck,nbjdk->nbjcd", q, k, dtype)[:, :, :, None] * decays
    o = product("nbjgcd,nbjgdv->nbjgcv", scores, new, dtype)
    o = o + entered[..., None] * product("nbjck,nbjgkv->nbjgcv", q, entering, dtype)
    return out_of_chunks(jnp.moveaxis(o, 3, 4), length), final
