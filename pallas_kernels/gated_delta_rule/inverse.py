"""The inverse of a unit lower triangular matrix, block by block."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient


def unit_lower_inverse(lower: Float[Array, "*S C C"]) -> Float[Array, "*S C C"]:
    """Return (I + lower)^-1 for a strictly lower triangular matrix; C is a power of two.

    A block of 2, 4, 8 ... C rows has the inverse [[X, 0], [-Y M X, Y]], with X and Y those of its halves and M what
    lies below the diagonal. This is substitution by blocks. Powers of `lower`, whose sum the inverse is too, would grow
    beyond any bound where the inverse itself is of the size of 1.
    """
    return _inverse(*vary_alike(lower))


@OwnGradient
def _inverse(lower: Array) -> Array:
    size, rows, found = 1, lower.shape[-1], jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)
    while size < rows:
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        below = -_multiply(_multiply(second, _below(lower, size)), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        found = jnp.concatenate([above, jnp.concatenate([below, second], -1)], -2)
        size *= 2
    return found[..., 0, :, :]


def _below(lower: Array, size: int) -> Array:
    """Return blocks of `size` rows below the diagonal blocks, [..., M, size, size]."""
    lead, count = lower.shape[:-2], lower.shape[-1] // (2 * size)
    blocks = lower.reshape(*lead, count, 2, size, count, 2, size)[..., :, 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)


def _multiply(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _inverse_fwd(lower: Array) -> tuple[Array, Array]:
    found = _inverse(lower)
    return found, found


def _inverse_bwd(found: Array, g: Array) -> tuple[Array]:
    turned = jnp.swapaxes(found, -1, -2)
    return (-jnp.tril(_multiply(_multiply(turned, g), turned), -1),)


_inverse.defvjp(_inverse_fwd, _inverse_bwd)
