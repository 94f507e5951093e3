"""Packed rows by halves, so that each product of long blocks serves one document alone."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels._conv.packed import LEAF, Product, fit, join_leaves, packed_causal
from pallas_kernels._conv.toeplitz import toeplitz_product

LARGEST_MATRIX = 128
"""Blocks up to this size are multiplied by a Toeplitz matrix, longer ones transformed."""

Products = Callable[[int], Product]


def products_by_size(long_product: Product, largest_matrix: int = LARGEST_MATRIX) -> Products:
    """How a block of each size is convolved: by matrix while that is cheaper, else by `long_product`."""
    return lambda size: toeplitz_product if size <= largest_matrix else long_product


def packed_rows(
    u: Float[Array, "B D T"],
    h: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    centre: int,
    causal: bool,
    alignment: int,
    product_of: Products,
) -> Float[Array, "B D T"]:
    """Convolution within documents, in fp32.

    Args:
      u: inputs, zero where there is no token.
      h: taps, lag 0 at index `centre`.
      documents: |segment id|.
      centre: 0 if causal.
      causal: no taps before the centre.
      alignment: documents start at multiples of it.
      product_of: the product to use for a given size of block.
    """
    if causal:
        return _causal(u, h, documents, alignment, product_of)
    # The past by one causal pass, the future by another on the reversed row; lag 0 belongs to the first. A row of
    # whole grid steps, reversed, still has one document between any two of them.
    length = u.shape[-1]
    future = h[:, : centre + 1][:, ::-1].at[:, 0].set(0)
    past = _causal(u, h[:, centre:], documents, alignment, product_of)
    whole = -(-length // alignment) * alignment
    back, ids = fit(u, whole)[..., ::-1], fit(documents, whole)[:, ::-1]
    return past + _causal(back, future, ids, alignment, product_of)[..., ::-1][..., :length]


def _causal(u: Array, h: Array, documents: Array, alignment: int, product_of: Products) -> Array:
    length = u.shape[-1]
    if alignment < LEAF:
        return packed_causal(u, h, documents, leaf=LEAF, block=length, product_of=product_of)
    # Between two multiples of the alignment lies one document: no halving is needed there.
    y = _aligned_blocks(u, h, alignment, product_of)
    return join_leaves(y, u, h, documents, leaf=alignment, block=length, product_of=product_of)


def _aligned_blocks(u: Array, h: Array, size: int, product_of: Products) -> Array:
    length = u.shape[-1]
    count = -(-length // size)
    blocks = fit(u, count * size).reshape(*u.shape[:2], count, size)
    y = product_of(size)(h, blocks, rows=size, offset=0)
    return y.reshape(*u.shape[:2], count * size)[..., :length]
