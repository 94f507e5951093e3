"""Chunks: matrix products inside of each, and a state carried from one to the next."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.chunks import fit_chunk, into_chunks, numbers_into_chunks, out_of_chunks
from pallas_kernels._linear_state.decays import Sums, pair_decays, sum_gates
from pallas_kernels._linear_state.products import product
from pallas_kernels._linear_state.tokens import Documents, count_documents, only_tokens
from pallas_kernels.gated_linear_attention.halves import read_under_value_gates, score_under_key_gates
from pallas_kernels.gated_linear_attention.states import carry_states


def gated_linear_attention_xla(
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
    """Compute `gated_linear_attention` by XLA."""
    (batch, length, heads, values), (_, _, key_heads, keys) = v.shape, k.shape
    wide, grouped = accumulator(v.dtype), (batch, length, key_heads, heads // key_heads)
    gate = log_gate if log_value_gate is None else log_value_gate
    if gate is None:
        gate = jnp.zeros(v.shape[:3], wide)
    gate = gate.reshape(*grouped, -1) if log_key_gate is None else log_key_gate
    state = jnp.zeros((batch, heads, keys, values), wide) if initial_state is None else initial_state
    # Hold the values of all heads of a group in one state, so that they are columns of one product with the shared
    # keys.
    state = jnp.moveaxis(state.astype(wide).reshape(batch, *grouped[2:], keys, values), 2, 3)
    numbers = None if segment_ids is None else count_documents(segment_ids)
    rows = [only_tokens(x, segment_ids) for x in (q, k, v.reshape(*grouped, values), gate)]
    arrays = vary_alike(*rows, state, numbers)
    chunk = fit_chunk(length, chunk_size)
    # Leave out a product with zeros: it costs as much as another, and is wrong on some CPUs (docs/notes/xla.md)
    reads = initial_state is not None or length > chunk
    o, final = _chunked(*arrays, log_key_gate is not None, chunk, reads)
    o = only_tokens((scale * o).reshape(v.shape).astype(v.dtype), segment_ids)
    final = jnp.moveaxis(final, 3, 2).reshape(batch, heads, keys, values)
    return (o, final) if output_final_state else o


@partial(jax.checkpoint, static_argnums=(6, 7, 8))
def _chunked(
    q: Array,
    k: Array,
    v: Array,
    gate: Array,
    state: Array,
    numbers: Array | None,
    by_key: bool,
    chunk: int,
    reads: bool,
) -> tuple[Array, Array]:
    """Run chunks.

    It is rematerialised: backward keeps the inputs and no state.

    Args:
      v: [B, T, J, G, V].
      gate: [B, T, J, K] if `by_key`, else [B, T, J, G, 1 or V].
      state: [B, J, K, G, V].
      reads: whether a chunk has a state to read, which is not zero.
    """
    length, dtype = v.shape[1], v.dtype
    q, k, v, gate = (into_chunks(x.astype(state.dtype), chunk) for x in (q, k, v, gate))
    documents = Documents(None if numbers is None else numbers_into_chunks(numbers, chunk))
    sums = sum_gates(gate)
    reading, writing = (jnp.exp(x) for x in sums[-1])
    decay = documents.carrying(reading[:, :, :, -1])
    read, written, left, decay = (
        (q * reading, k * writing, v, decay[..., None, None])
        if by_key
        else (q, k, v * writing, decay[:, :, :, None])
    )
    added = product("nbhck,nbhcgv->nbhkgv", documents.writing(written), left, dtype)
    entering, final = carry_states(decay, added, state, dtype)
    o = _within_chunks(q, k, v, sums, documents, dtype)
    if reads:
        before = product("nbhck,nbhkgv->nbhcgv", documents.reading(read), entering, dtype)
        o = (before if by_key else before * reading) + o
    return out_of_chunks(o, length), final


def _within_chunks(q: Array, k: Array, v: Array, sums: Sums, documents: Documents, dtype: Any) -> Array:
    """Return what each step reads of the steps before it in its chunk, and of itself."""
    gate = sums[0][0]
    if gate.ndim == q.ndim:
        scores = documents.within(score_under_key_gates(q, k, sums, dtype))
        return product("nbhij,nbhjgv->nbhigv", scores, v, dtype)
    scores = product("nbhik,nbhjk->nbhij", q, k, dtype)
    if gate.shape[-1] != 1:
        return read_under_value_gates(documents.within(scores), v, sums, dtype)
    decays = pair_decays([(prefix[..., 0], suffix[..., 0]) for prefix, suffix in sums])
    scores = documents.within(scores[:, :, :, None] * decays)
    return product("nbhgij,nbhjgv->nbhigv", scores, v, dtype)
