"""Convolution of short blocks as matrix products with Toeplitz matrices, one matrix per channel."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._own_gradient import OwnGradient


def window(filter: Float[Array, "D F"], start: int, length: int) -> Float[Array, "D length"]:
    """Return filter[:, start : start + length], zero where that lies outside of the filter."""
    low, high = min(max(start, 0), filter.shape[1]), min(max(start + length, 0), filter.shape[1])
    if high <= low:
        return jnp.zeros((filter.shape[0], length), filter.dtype)
    return jnp.pad(filter[:, low:high], ((0, 0), (low - start, start + length - high)))


def toeplitz(
    filter: Float[Array, "D F"], rows: int, columns: int, offset: int
) -> Float[Array, "D rows columns"]:
    """Return M[d, i, j] = filter[d, offset + i - j], zero outside of the filter.

    Built by laying the reversed taps end to end, one copy per row, and cutting rows one shorter than a copy: each
    row then starts one tap later. Its transpose is a sum over rows, where that of a gather would be a scatter.
    """
    width = rows + columns
    taps = window(filter, offset - columns + 1, width - 1)[:, ::-1]
    taps = jnp.pad(taps, ((0, 0), (0, 1)))
    laid = jnp.broadcast_to(taps[:, None], (taps.shape[0], rows, width)).reshape(taps.shape[0], rows * width)
    skewed = laid[:, : rows * (width - 1)].reshape(taps.shape[0], rows, width - 1)
    return skewed[:, :, rows - 1 : rows - 1 + columns]


def precision(*operands: Array) -> lax.Precision:
    """Return full fp32 if all operands are wide, else what the narrow one deserves.

    That is TF32 or better.
    """
    wide = all(jnp.finfo(x.dtype).bits >= 32 for x in operands)
    return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT


@partial(OwnGradient, nondiff_argnums=(2, 3))
def _product(filter: Array, u: Array, rows: int, offset: int) -> Array:
    matrix = toeplitz(filter.astype(u.dtype), rows, u.shape[-1], offset)
    return jnp.einsum(
        "dij,bdnj->bdni", matrix, u, preferred_element_type=accumulator(u.dtype), precision=precision(u)
    )


def _product_fwd(filter: Array, u: Array, rows: int, offset: int) -> tuple[Array, tuple[Array, Array]]:
    return _product(filter, u, rows, offset), (filter, u)


def _product_bwd(rows: int, offset: int, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    filter, u = residuals
    wide, exact = accumulator(u.dtype), precision(u)
    # Run both products on u's dtype: a mixed pair would be widened, and miss the tensor cores.
    g = g.astype(u.dtype)
    matrix = toeplitz(filter.astype(u.dtype), rows, u.shape[-1], offset)
    du = jnp.einsum("dij,bdni->bdnj", matrix, g, preferred_element_type=wide, precision=exact)
    dmatrix = jnp.einsum("bdni,bdnj->dij", g, u, preferred_element_type=wide, precision=exact)
    _, vjp = jax.vjp(lambda taps: toeplitz(taps, rows, u.shape[-1], offset), filter.astype(wide))
    (dfilter,) = vjp(dmatrix)
    return dfilter.astype(filter.dtype), du.astype(u.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def toeplitz_product(
    filter: Float[Array, "D F"], u: Float[Array, "B D N C"], *, rows: int, offset: int
) -> Float[Array, "B D N rows"]:
    """Return y_i = sum_j filter[offset + i - j] u_j in each of N blocks.

    Operands are in u's dtype, sums in fp32.
    """
    filter, u = vary_alike(filter, u)
    return _product(filter, u, rows, offset)
