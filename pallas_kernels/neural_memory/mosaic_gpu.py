"""The op with its reads and the gradients of its writes in Hopper kernels; derivatives of both are XLA's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels._linear_state.products import multiply
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.neural_memory import mosaic_gpu_read, two_layers
from pallas_kernels.neural_memory.chunks import Products, scaled
from pallas_kernels.neural_memory.mosaic_gpu_gradients import weight_gradients
from pallas_kernels.neural_memory.two_layers import EPSILON, KEPT, Matrices
from pallas_kernels.neural_memory.xla import neural_memory_xla


def neural_memory_mosaic_gpu(*arrays: Any, interpret: Any = None, **options: Any) -> Any:
    """See `neural_memory`; what `hopper.why_not` refuses is not looked at again.

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
    """f(q) in `dtype`."""
    q, first, second = (x.astype(dtype) for x in vary_alike(q, *scaled(weights, scale)))
    return _read(interpret, q, first, second)


def gradients(
    interpret: Any,
    weights: Matrices,
    k: Float[Array, "B H C K"],
    v: Float[Array, "B H C K"],
    theta: Float[Array, "B H C"],
    dtype: Any,
    scale: Float[Array, "B H"] | None = None,
) -> tuple[Matrices, Float[Array, "B H C"]]:
    """As `two_layers.gradients`."""
    k, v, theta, first, second = vary_alike(k, v, theta, *scaled(weights, scale))
    return _gradients(interpret, (k.dtype, v.dtype, first.dtype), dtype, k, v, theta, first, second)


@partial(OwnGradient, nondiff_argnums=(0,))
def _read(interpret: Any, x: Array, first: Array, second: Array) -> Array:
    flat = (a.reshape(-1, *a.shape[2:]) for a in (x, first, second))
    return mosaic_gpu_read.read(*flat, interpret=interpret).reshape(x.shape)


def _read_fwd(interpret: Any, *given: Array) -> tuple[Array, Any]:
    return _read(interpret, *given), given


def _read_bwd(interpret: Any, kept: Any, g: Array) -> tuple[Array, ...]:
    """Makes what has a column for each hidden unit again."""
    del interpret
    _, pull = jax.vjp(lambda x, *weights: two_layers.apply(weights, x, x.dtype), *kept)
    return pull(g.astype(jnp.float32))


_read.defvjp(_read_fwd, _read_bwd)


@partial(OwnGradient, nondiff_argnums=(0, 1, 2))
def _gradients(
    interpret: Any, dtypes: Any, dtype: Any, k: Array, v: Array, theta: Array, first: Array, second: Array
) -> tuple[Matrices, Array]:
    return _gradients_fwd(interpret, dtypes, dtype, k, v, theta, first, second)[0]


def _gradients_fwd(
    interpret: Any, dtypes: Any, dtype: Any, k: Array, v: Array, theta: Array, first: Array, second: Array
) -> tuple[tuple[Matrices, Array], Any]:
    del dtypes
    narrow = [a.astype(dtype) for a in (k, first, second, v)]
    flat = [a.reshape(-1, *a.shape[2:]) for a in narrow]
    error = mosaic_gpu_read.read(*flat, interpret=interpret)
    error = checkpoint_name(error.reshape(k.shape), KEPT)
    keys, lost = (jnp.sum(jnp.square(x.astype(theta.dtype)), -1) for x in (k, error))
    both = jnp.stack([theta, theta * keys / (lost + EPSILON)], 2)
    x, first, second, _ = flat
    found, powers = weight_gradients(
        *(x, error.reshape(x.shape), first, second), both.reshape(-1, *both.shape[2:]), interpret=interpret
    )
    divisor = jnp.maximum(jnp.sum(powers, (1, 2)), 1).reshape(*k.shape[:2], 1, 1)
    by_second, by_first = (found[:, i].reshape(*k.shape[:2], *found.shape[2:]) / divisor for i in range(2))
    kept = (narrow[0], error, lost, theta, *narrow[1:3])
    return ((jnp.swapaxes(by_first, 2, 3), by_second), lost), kept


def _gradients_bwd(interpret: Any, dtypes: Any, dtype: Any, kept: Any, g: Any) -> tuple[Array, ...]:
    """Makes what has a column for each hidden unit again."""
    del interpret
    k, error, lost, theta, first, second = kept
    hidden = multiply("bhck,bhke->bhce", k, first, dtype)
    one = jnp.ones(k.shape[:2], theta.dtype)
    at = two_layers.look_back(k, hidden, error, lost, theta, (first, second), one)
    return two_layers.gradients_bwd(dtype, dtypes, (at, theta), g)[:5]


_gradients.defvjp(_gradients_fwd, _gradients_bwd)
