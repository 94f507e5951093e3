"""Packed rows by halves, so that each product of long blocks serves only one document."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from pallas_kernels._conv.packed import LEAF, Product, fit, join_leaves, sum_within_leaves
from pallas_kernels._conv.toeplitz import toeplitz_product

LARGEST_MATRIX = 128
"""Blocks up to this size are multiplied by a Toeplitz matrix, longer ones transformed."""


class Parts(NamedTuple):
    """The parts that a row is put together from.

    Attributes:
      leaf: size of the smallest blocks, within which `leaves(u, h, documents)` convolves documents.
      product_of: the product of blocks or halves of a given size.
    """

    leaf: int
    leaves: Callable[[Array, Array, Array], Array]
    product_of: Callable[[int], Product]


def parts_by_size(long_product: Product) -> Parts:
    """Return parts by size: blocks of 16 tap by tap, others by matrix or `long_product`.

    A matrix is taken while it is cheaper.
    """
    leaves = partial(sum_within_leaves, leaf=LEAF)
    return Parts(LEAF, leaves, lambda size: toeplitz_product if size <= LARGEST_MATRIX else long_product)


def packed_rows(
    u: Float[Array, "B D T"],
    h: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    centre: int,
    causal: bool,
    alignment: int,
    parts: Parts,
) -> Float[Array, "B D T"]:
    """Convolve within documents, in fp32.

    Args:
      u: inputs, zero where there is no token.
      h: taps, lag 0 at index `centre`.
      documents: |segment id|.
      centre: 0 if causal.
      causal: no taps before the centre.
      alignment: documents start at multiples of it.
      parts: how blocks are convolved, by size.
    """
    if causal:
        return _causal(u, h, documents, alignment, parts)
    # Make the past by one causal pass and the future by another on the reversed row; lag 0 belongs to the first. A row
    # of whole grid steps, reversed, still has one document between any two of them.
    length = u.shape[-1]
    future = h[:, : centre + 1][:, ::-1].at[:, 0].set(0)
    past = _causal(u, h[:, centre:], documents, alignment, parts)
    whole = -(-length // alignment) * alignment
    back, ids = fit(u, whole)[..., ::-1], fit(documents, whole)[:, ::-1]
    return past + _causal(back, future, ids, alignment, parts)[..., ::-1][..., :length]


def _causal(u: Array, h: Array, documents: Array, alignment: int, parts: Parts) -> Array:
    if alignment < parts.leaf:
        leaf, y = parts.leaf, parts.leaves(u, h, documents)
    else:  # Between two multiples of the alignment lies one document: no halving is needed there.
        leaf, y = alignment, _aligned_blocks(u, h, alignment, parts.product_of)
    return join_leaves(y, u, h, documents, leaf=leaf, block=u.shape[-1], product_of=parts.product_of)


def _aligned_blocks(u: Array, h: Array, size: int, product_of: Callable[[int], Product]) -> Array:
    length = u.shape[-1]
    count = -(-length // size)
    blocks = fit(u, count * size).reshape(*u.shape[:2], count, size)
    y = product_of(size)(h, blocks, rows=size, offset=0)
    return y.reshape(*u.shape[:2], count * size)[..., :length]
