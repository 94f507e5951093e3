"""Two Toeplitz products per block: the block with itself, and with the one before (and after, if bidirectional)."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels._conv.packed import fit, keep, packed_within_blocks, same_document
from pallas_kernels._conv.toeplitz import toeplitz_product

STEP = 64
SMALLEST = 128


def block_size(taps: int, length: int) -> int:
    """Return steps per block: the filter rounded up to a multiple of STEP, at least SMALLEST.

    There are fewer for short rows.
    """
    block = max(SMALLEST, -(-taps // STEP) * STEP)
    return block if length > block else min(block, 1 << (length - 1).bit_length())


def blocked_conv_xla(
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
    """Compute `blocked_conv` by XLA."""
    u = enter(x, pre_gate, segment_ids)
    centre = 0 if causal else (filter.shape[1] - 1) // 2
    block = block_size(filter.shape[1] - centre, x.shape[2])
    h = add_skip(filter.astype(accumulator(x.dtype)), bias, centre)
    documents = None if segment_ids is None else jnp.abs(segment_ids)
    if documents is None or segment_alignment % block == 0:
        y = _by_blocks(u, h, documents, block, centre, True)
    elif causal:
        y = _by_blocks(u, h, documents, block, 0, False)
    else:
        # Make the past by one causal pass and the future by another on the reversed row; lag 0 belongs to the first.
        future = h[:, : centre + 1][:, ::-1].at[:, 0].set(0)
        y = _by_blocks(u, h[:, centre:], documents, block, 0, False)
        y = y + _by_blocks(u[..., ::-1], future, documents[:, ::-1], block, 0, False)[..., ::-1]
    return leave(y, post_gate, segment_ids, x.dtype)


@partial(jax.checkpoint, static_argnums=(3, 4, 5))
def _by_blocks(
    u: Array, h: Array, documents: Array | None, block: int, centre: int, one_document_per_block: bool
) -> Array:
    """Convolve by blocks.

    It is rematerialised: linear in u and h, backward needs these two and no intermediate.
    """
    count = -(-u.shape[-1] // block)

    def blocks(z: Array) -> Array:
        return fit(z, count * block).reshape(*z.shape[:-1], count, block)

    here, ids = blocks(u), None if documents is None else blocks(documents)
    if ids is None or one_document_per_block:
        y = toeplitz_product(h, here, rows=block, offset=centre)
    else:
        y = packed_within_blocks(here, h, ids)
    if count > 1:
        y = y + _from_neighbour(h, here, ids, 1, centre, one_document_per_block)
    if count > 1 and centre:
        y = y + _from_neighbour(h, here, ids, -1, centre, one_document_per_block)
    return y.reshape(*u.shape[:2], count * block)[..., : u.shape[-1]]


def _from_neighbour(
    h: Array, here: Array, ids: Array | None, step: int, centre: int, one_document_per_block: bool
) -> Array:
    """Return what each block gets from the block `step` before it.

    Only the document across their edge takes part.
    """
    block = here.shape[-1]
    near = _move(here, step, axis=2)
    if ids is not None and not one_document_per_block:
        edge = _move(ids[..., -1:], step, axis=1)
        near = keep(same_document(_move(ids, step, axis=1), edge), near)
    y = toeplitz_product(h, near, rows=block, offset=centre + step * block)
    if ids is not None:
        # Compare with the document that a block begins with, where it holds one: what follows it there is padding.
        edge = ids[..., :1] if one_document_per_block else ids[..., -1:]
        y = keep(same_document(ids, _move(edge, step, axis=1)), y)
    return y


def _move(x: Array, step: int, axis: int) -> Array:
    """Move x by one block along `axis`: right for step 1, left for -1; zeros enter."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (1, 0) if step == 1 else (0, 1)
    count = x.shape[axis]
    start = 0 if step == 1 else 1
    return jax.lax.slice_in_dim(jnp.pad(x, pad), start, start + count, axis=axis)
