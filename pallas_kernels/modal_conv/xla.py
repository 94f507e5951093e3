"""Chunks: a Toeplitz product inside of each, and a state of M numbers per channel carried from one to the next."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels._conv.packed import LEAF, fit, packed_within_blocks
from pallas_kernels._conv.shifted import shifted_products
from pallas_kernels._conv.toeplitz import toeplitz_product
from pallas_kernels.modal_conv.filter import modal_filter
from pallas_kernels.modal_conv.states import entering_states, final_state, read_states


def modal_conv_xla(
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
    """Compute `modal_conv` by XLA."""
    # Cast here: gradients of the weights are then added up before devices exchange them, [D, M] instead of one a chunk.
    x, log_poles, residues, bias = vary_alike(x, log_poles, residues, bias)
    wide = accumulator(x.dtype)
    u = enter(x, pre_gate, segment_ids)
    modes = (log_poles.astype(wide), residues.astype(wide), None if bias is None else bias.astype(wide))
    documents = None if segment_ids is None else jnp.abs(segment_ids)
    state = None if initial_state is None else initial_state.astype(wide)
    if x.shape[2] == 1:
        y, final = _one_step(u, modes, documents, state)
    else:
        aligned = documents is None or segment_alignment % chunk_size == 0
        y, final = _chunked(u, modes, documents, state, chunk_size, aligned, output_final_state)
    y = leave(y, post_gate, segment_ids, x.dtype)
    return (y, final) if output_final_state else y


Modes = tuple[Array, Array, Array | None]


def _one_step(u: Array, modes: Modes, documents: Array | None, state: Array | None) -> tuple[Array, Array]:
    """Take a single token by the recurrence itself."""
    log_poles, residues, bias = modes
    u = u.astype(log_poles.dtype)
    before = jnp.zeros_like(u * log_poles[None]) if state is None else state
    poles = jnp.exp(log_poles)[None]
    after = poles * before + u
    if len(u) == 1:
        # Write the sum out: XLA ends a kernel at a sum over an axis, and these are fused with what stands around them
        single = [slice(m, m + 1) for m in range(log_poles.shape[1])]
        each = [residues[None, :, m] * (poles[..., m] * before[..., m] + u) for m in single]
        y = reduce(jnp.add, each)
    else:
        y = jnp.sum(residues[None] * after, -1, keepdims=True)
    if bias is not None:
        y = y + bias[None, :, None] * u
    if documents is not None:
        after = jnp.where(documents[:, :, None] != 0, after, before)
    return y, after


@partial(jax.checkpoint, static_argnums=(4, 5, 6))
def _chunked(
    u: Array,
    modes: Modes,
    documents: Array | None,
    state: Array | None,
    chunk_size: int,
    aligned: bool,
    want_final: bool,
) -> tuple[Array, Array | None]:
    """Run chunks.

    It is rematerialised: backward computes the chunks' states again (1/8 of u) and keeps no other intermediate.
    """
    log_poles, residues, bias = modes
    length = u.shape[2]
    chunk = length if length <= LEAF else min(chunk_size, -(-length // LEAF) * LEAF)
    count = -(-length // chunk)

    def chunks(z: Array) -> Array:
        return fit(z, count * chunk).reshape(*z.shape[:-1], count, chunk)

    blocks, ids = chunks(u), None if documents is None else chunks(documents)
    y = _within_chunks(blocks, add_skip(modal_filter(log_poles, residues, chunk), bias, 0), ids, aligned)
    entering = None
    if count > 1 or state is not None:
        entering = entering_states(blocks, log_poles, ids, state, one_document_per_chunk=aligned)
        y = y + read_states(entering, log_poles, residues, ids, like=blocks)
    y = y.reshape(*u.shape[:2], count * chunk)[..., :length]
    if not want_final:
        return y, None
    return y, final_state(u, log_poles, documents, entering, state, chunk=chunk)


def _within_chunks(blocks: Array, h: Array, ids: Array | None, aligned: bool) -> Array:
    chunk = blocks.shape[-1]
    if chunk <= LEAF:
        return shifted_products(blocks, h, ids)
    if ids is None or aligned:
        return toeplitz_product(h, blocks, rows=chunk, offset=0)
    return packed_within_blocks(blocks, h, ids)
