"""Packed rows within blocks of 512 steps: values by a Hopper kernel, gradients by two more or as XLA makes them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.packed import LEAF, packed_causal
from pallas_kernels._conv.toeplitz import toeplitz_product
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.long_conv.blocks import BLOCK, Orders, as_blocks, block_weights, from_blocks
from pallas_kernels.long_conv.mosaic_gpu_blocks import convolve_blocks, correlate_blocks


def convolve_within_blocks(
    u: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    gradients: bool,
    interpret: bool,
) -> Float[Array, "B D T"]:
    """Causal convolution within documents and within blocks of 512 steps, in bf16; taps are rounded to bf16.

    Args:
      u: inputs, zero where there is no token.
      filter: taps from lag 0 on.
      documents: |segment id|.
      gradients: by kernels too.
      interpret: run on the CPU in Pallas' simulation of a GPU.
    """
    return _within(gradients, interpret, *vary_alike(u, filter, documents))


@partial(OwnGradient, nondiff_argnums=(0, 1))
def _within(gradients: bool, interpret: bool, u: Array, filter: Array, documents: Array) -> Array:
    return _convolve(u, filter, documents, adjoint=False, interpret=interpret)


def _forward(gradients: bool, interpret: bool, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _within(gradients, interpret, *arrays), arrays


def _backward(gradients: bool, interpret: bool, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    u, filter, documents = arrays
    if not gradients:
        _, vjp = jax.vjp(lambda u, filter: _by_halves(u, filter, documents), u, filter)
        return *vjp(g.astype(jnp.float32)), None
    du = _convolve(g, filter, documents, adjoint=True, interpret=interpret)
    found = correlate_blocks(as_blocks(u), as_blocks(g), Orders.of(documents), interpret=interpret)
    _, vjp = jax.vjp(block_weights, filter)
    return du, *vjp(found.sum(1).astype(filter.dtype)), None


_within.defvjp(_forward, _backward)


def _convolve(u: Array, filter: Array, documents: Array, *, adjoint: bool, interpret: bool) -> Array:
    weights = block_weights(filter).astype(u.dtype)
    options = {"adjoint": adjoint, "interpret": interpret}
    return from_blocks(convolve_blocks(as_blocks(u), weights, Orders.of(documents), **options), u.shape)


def _by_halves(u: Array, filter: Array, documents: Array) -> Array:
    options = {"leaf": LEAF, "block": BLOCK, "product_of": lambda size: toeplitz_product}
    return packed_causal(u, filter, documents, **options)
