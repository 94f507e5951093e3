"""One FFT per row; packed rows by halves, so that each transform serves one document alone."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator, add_skip, enter, leave
from pallas_kernels._conv.packed import LEAF, Product, fit, join_leaves, packed_causal
from pallas_kernels._conv.toeplitz import toeplitz_product
from pallas_kernels.long_conv.fft import fft_product

LARGEST_MATRIX = 128
"""Blocks up to this size are multiplied by a Toeplitz matrix, longer ones transformed."""


def product_of(size: int) -> Product:
    """How a block of `size` is convolved: by matrix while that is cheaper, else by FFT."""
    return toeplitz_product if size <= LARGEST_MATRIX else fft_product


def long_conv_xla(
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
    """See `long_conv`."""
    u = enter(x, pre_gate, segment_ids)
    centre = 0 if causal else (filter.shape[1] - 1) // 2
    h = add_skip(filter.astype(accumulator(x.dtype)), bias, centre)
    if segment_ids is None or segment_alignment >= x.shape[2]:
        y = fft_product(h, u[:, :, None], rows=x.shape[2], offset=centre)[:, :, 0]
    else:
        y = _packed(u, h, jnp.abs(segment_ids), centre, causal, segment_alignment)
    return leave(y, post_gate, segment_ids, x.dtype)


def _packed(u: Array, h: Array, documents: Array, centre: int, causal: bool, alignment: int) -> Array:
    if causal:
        return _packed_causal(u, h, documents, alignment)
    # The past by one causal pass, the future by another on the reversed row; lag 0 belongs to the first. A row of
    # whole grid steps, reversed, still has one document between any two of them.
    length = u.shape[-1]
    future = h[:, : centre + 1][:, ::-1].at[:, 0].set(0)
    past = _packed_causal(u, h[:, centre:], documents, alignment)
    whole = -(-length // alignment) * alignment
    back, ids = fit(u, whole)[..., ::-1], fit(documents, whole)[:, ::-1]
    return past + _packed_causal(back, future, ids, alignment)[..., ::-1][..., :length]


def _packed_causal(u: Array, h: Array, documents: Array, alignment: int) -> Array:
    length = u.shape[-1]
    if alignment < LEAF:
        return packed_causal(u, h, documents, leaf=LEAF, block=length, product_of=product_of)
    # Between two multiples of the alignment lies one document: no halving is needed there.
    y = _aligned_blocks(u, h, alignment)
    return join_leaves(y, u, h, documents, leaf=alignment, block=length, product_of=product_of)


def _aligned_blocks(u: Array, h: Array, size: int) -> Array:
    length = u.shape[-1]
    count = -(-length // size)
    blocks = fit(u, count * size).reshape(*u.shape[:2], count, size)
    y = product_of(size)(h, blocks, rows=size, offset=0)
    return y.reshape(*u.shape[:2], count * size)[..., :length]
