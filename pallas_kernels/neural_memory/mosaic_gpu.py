"""The op with its reads and the gradients of its writes in Hopper kernels, which have no derivative."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels.neural_memory import mosaic_gpu_read
from pallas_kernels.neural_memory.chunks import Products, scaled
from pallas_kernels.neural_memory.mosaic_gpu_gradients import weight_gradients
from pallas_kernels.neural_memory.two_layers import EPSILON, Matrices
from pallas_kernels.neural_memory.xla import neural_memory_xla


def neural_memory_mosaic_gpu(*arrays: Any, interpret: Any = None, **options: Any) -> Any:
    """Compute `neural_memory`; what `hopper.why_not` refuses is not checked again.

    Args:
      arrays: of the op.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
      options: of the op.
    """
    products = Products(partial(read, interpret), partial(gradients, interpret))
    return neural_memory_xla(*arrays, products=products, **options)


def read(
    interpret: Any,
    weights: Matrices,
    q: Float[Array, "B H C K"],
    dtype: Any,
    scale: Float[Array, "B H"] | None = None,
) -> Array:
    """Return f(q) in `dtype`."""
    x, first, second = (x.astype(dtype) for x in vary_alike(q, *scaled(weights, scale)))
    flat = (a.reshape(-1, *a.shape[2:]) for a in (x, first, second))
    return mosaic_gpu_read.read(*flat, interpret=interpret).reshape(x.shape)


def gradients(
    interpret: Any,
    weights: Matrices,
    k: Float[Array, "B H C K"],
    v: Float[Array, "B H C K"],
    theta: Float[Array, "B H C"],
    dtype: Any,
    scale: Float[Array, "B H"] | None = None,
) -> tuple[Matrices, Float[Array, "B H C"]]:
    """Return what `two_layers.gradients` does."""
    k, v, theta, first, second = vary_alike(k, v, theta, *scaled(weights, scale))
    narrow = [a.astype(dtype) for a in (k, first, second, v)]
    flat = [a.reshape(-1, *a.shape[2:]) for a in narrow]
    error = mosaic_gpu_read.read(*flat, interpret=interpret)
    keys, lost = (jnp.sum(jnp.square(x.astype(theta.dtype)), -1) for x in (k, error.reshape(k.shape)))
    both = jnp.stack([theta, theta * keys / (lost + EPSILON)], 2)
    x, first, second, _ = flat
    found, powers = weight_gradients(
        *(x, error, first, second), both.reshape(-1, *both.shape[2:]), interpret=interpret
    )
    divisor = jnp.maximum(jnp.sum(powers, (1, 2)), 1).reshape(*k.shape[:2], 1, 1)
    by_second, by_first = (found[:, i].reshape(*k.shape[:2], *found.shape[2:]) / divisor for i in range(2))
    return (jnp.swapaxes(by_first, 2, 3), by_second), lost
