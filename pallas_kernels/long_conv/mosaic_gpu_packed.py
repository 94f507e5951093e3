"""Packed rows within blocks of 512 steps: values by a Hopper kernel, gradients by two more."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.long_conv.blocks import Orders, as_blocks, block_weights, from_blocks
from pallas_kernels.long_conv.mosaic_gpu_blocks import convolve_blocks, correlate_blocks


def convolve_within_blocks(
    u: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    documents: Int[Array, "B T"],
    *,
    interpret: bool,
) -> Float[Array, "B D T"]:
    """Convolve causally within documents and blocks of 512 steps, in bf16.

    Taps are rounded to bf16.

    Args:
      u: inputs, zero where there is no token.
      filter: taps from lag 0 on.
      documents: |segment id|.
      interpret: run on the CPU in Pallas' simulation of a GPU.
    """
    return _within(interpret, *vary_alike(u, filter, documents))


@partial(OwnGradient, nondiff_argnums=(0,))
def _within(interpret: bool, u: Array, filter: Array, documents: Array) -> Array:
    return _convolve(u, filter, documents, adjoint=False, interpret=interpret)


def _forward(interpret: bool, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _within(interpret, *arrays), arrays


def _backward(interpret: bool, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    u, filter, documents = arrays
    du = _convolve(g, filter, documents, adjoint=True, interpret=interpret)
    found = correlate_blocks(as_blocks(u), as_blocks(g), Orders.of(documents), interpret=interpret)
    _, vjp = jax.vjp(block_weights, filter)
    return du, *vjp(found.sum(1).astype(filter.dtype)), None


_within.defvjp(_forward, _backward)


def _convolve(u: Array, filter: Array, documents: Array, *, adjoint: bool, interpret: bool) -> Array:
    weights = block_weights(filter).astype(u.dtype)
    options = {"adjoint": adjoint, "interpret": interpret}
    return from_blocks(convolve_blocks(as_blocks(u), weights, Orders.of(documents), **options), u.shape)
