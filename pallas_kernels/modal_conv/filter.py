"""The filter that a sum of exponentials spells out."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._conv.gates import accumulator

BLOCK = 128


def powers(log_poles: Float[Array, "D M"], exponents: Int[Array, "K"]) -> Float[Array, "D M K"]:
    """Return exp(log_poles * k).

    It is no product of rounded factors, so step 10^6 is as exact as step 1.
    """
    return jnp.exp(log_poles[:, :, None] * exponents[None, None].astype(log_poles.dtype))


def modal_filter(
    log_poles: Float[Array, "D M"], residues: Float[Array, "D M"], length: int
) -> Float[Array, "D length"]:
    """Return h[t] = sum_m residues_m exp(t log_poles_m) for t = 0 ... length - 1.

    With t = 128 a + b it is a matrix product of (residues exp(128 a log_poles)) and exp(b log_poles): [D, M, length]
    never exists. The filter that makes `long_conv` equal to `modal_conv`.

    Args:
      log_poles: logarithm of each mode's decay per step, negative.
      residues: weight of each mode.
      length: number of taps.

    Source: the modal form of distilled Hyena filters (Massaroli et al. 2023, arXiv:2310.18780, sec. 3).
    """
    wide = accumulator(log_poles.dtype)
    log_poles, residues = log_poles.astype(wide), residues.astype(wide)
    block = min(BLOCK, length)
    count = -(-length // block)
    coarse = residues[:, :, None] * powers(log_poles, jnp.arange(count) * block)
    fine = powers(log_poles, jnp.arange(block))
    h = jnp.einsum("dma,dmb->dab", coarse, fine, precision=lax.Precision.HIGHEST)
    return h.reshape(h.shape[0], count * block)[:, :length]
