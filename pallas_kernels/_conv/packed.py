"""Exact causal convolution of packed rows, by halves.

Cut a block in two. What the left half sends to the right half belongs to the one document that lies across the middle.
Masking the input and the output of that product by document is therefore exact, and no product needs a mask inside. The
halves are then cut in turn, all blocks of one size together. Levels above size s cost what T / 2s products of size s
cost, less than the dense product they replace, as it has no zero half.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._conv.shifted import shifted_products
from pallas_kernels._conv.toeplitz import toeplitz_product

LEAF = 16
"""Blocks this long or shorter are summed tap by tap, with a mask on each tap."""


@runtime_checkable
class Product(Protocol):
    """y_i = sum_j filter[offset + i - j] u_j in each of N blocks (Toeplitz matrices or FFT)."""

    def __call__(self, filter: Array, u: Array, *, rows: int, offset: int) -> Array: ...


def same_document(documents: Int[Array, "B N T"], edge: Int[Array, "B N 1"]) -> Bool[Array, "B 1 N T"]:
    """Mark steps that are of the document at their block's edge, for all channels."""
    return (documents == edge)[:, None]


def keep(mask: Array, x: Array) -> Array:
    """Return x where the mask holds, else zero."""
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def fit(x: Array, length: int) -> Array:
    """Cut x's last axis, or fill it up with zeros, to `length`."""
    x = x[..., :length]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])


@partial(jax.checkpoint, static_argnums=(3, 4))
def across_middles(
    u: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    size: int,
    product: Product,
) -> Float[Array, "B D T"]:
    """Return what each left half of a block of 2 * size adds to its right half, in a document.

    Rematerialised: u is all that backward needs, at every size the same array.
    """
    (batch, channels, length), reach = u.shape, min(size, filter.shape[1] - 1)
    pairs = -(-(length - size) // (2 * size))
    rows = min(reach, length - size) if pairs == 1 else reach

    def blocks(x: Array) -> Array:
        return fit(x, pairs * 2 * size).reshape(*x.shape[:-1], pairs, 2 * size)

    halves, inside = blocks(u), blocks(documents)
    left, edge = slice(size - reach, size), slice(size - 1, size)
    sent = keep(same_document(inside[..., left], inside[..., edge]), halves[..., left])
    got = product(filter, sent, rows=rows, offset=reach)
    got = keep(same_document(inside[..., size : size + rows], inside[..., edge]), got)
    got = jnp.pad(got, ((0, 0), (0, 0), (0, 0), (size, size - rows)))
    return fit(got.reshape(batch, channels, pairs * 2 * size), length)


def leaf_size(block: int) -> int:
    """Return the size at which halving a block ends.

    It is at most LEAF, or where a half would not be whole.
    """
    while block > LEAF and block % 2 == 0:
        block //= 2
    return block


def packed_causal(
    u: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    leaf: int,
    block: int,
    product_of: Callable[[int], Product],
) -> Float[Array, "B D T"]:
    """Convolve causally within documents and blocks of `leaf`, joined up to blocks of `block`.

    Args:
      u: inputs, zero where there is no token.
      filter: taps from lag 0 on.
      documents: |segment id|; each document is contiguous.
      leaf: size of the smallest blocks, summed tap by tap.
      block: largest blocks, leaf times a power of two; T or more convolves whole rows.
      product_of: the product to use for a given size of half.
    """
    y = sum_within_leaves(u, filter, documents, leaf)
    return join_leaves(y, u, filter, documents, leaf=leaf, block=block, product_of=product_of)


def join_leaves(
    y: Float[Array, "B D T"],
    u: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    leaf: int,
    block: int,
    product_of: Callable[[int], Product],
) -> Float[Array, "B D T"]:
    """Join y, right within blocks of `leaf`, to be right within blocks of `block`."""
    size = leaf
    while size < min(block, u.shape[-1]) and filter.shape[1] > 1:
        y = y + across_middles(u, filter, documents, size, product_of(size))
        size *= 2
    return y


def sum_within_leaves(
    u: Float[Array, "B D T"], filter: Float[Array, "D F"], documents: Int[Array, "B T"], leaf: int
) -> Float[Array, "B D T"]:
    """Convolve causally within documents and within blocks of `leaf`, tap by tap."""
    length = u.shape[-1]
    count = -(-length // leaf)

    def blocks(x: Array) -> Array:
        return fit(x, count * leaf).reshape(*x.shape[:-1], count, leaf)

    y = shifted_products(blocks(u), filter[:, :leaf], blocks(documents))
    return y.reshape(*u.shape[:2], count * leaf)[..., :length]


def packed_within_blocks(
    u: Float[Array, "B D N C"], filter: Float[Array, "D F"], documents: Int[Array, "B N C"]
) -> Float[Array, "B D N C"]:
    """Convolve causally within documents and each of N blocks.

    C is at most LEAF times a power of two.
    """
    block = u.shape[-1]
    flat, ids = u.reshape(*u.shape[:2], -1), documents.reshape(documents.shape[0], -1)
    y = packed_causal(
        flat, filter, ids, leaf=leaf_size(block), block=block, product_of=lambda size: toeplitz_product
    )
    return y.reshape(u.shape)
