"""The op with its reads in a Hopper kernel; writes, and the derivatives of reads, are XLA's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels.neural_memory import mosaic_gpu_read, two_layers
from pallas_kernels.neural_memory.xla import neural_memory_xla


def neural_memory_mosaic_gpu(*arrays: Any, interpret: Any = None, **options: Any) -> Any:
    """See `neural_memory`; what `hopper.why_not` refuses is not looked at again.

    Args:
      arrays: of the op.
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
      options: of the op.
    """
    return neural_memory_xla(*arrays, read=partial(read, interpret), **options)


def read(interpret: Any, weights: two_layers.Matrices, q: Float[Array, "B H C K"], dtype: Any) -> Array:
    """f(q) in `dtype`."""
    q, first, second = (x.astype(dtype).reshape(-1, *x.shape[2:]) for x in (q, *weights))
    return _apply(interpret, *vary_alike(q, first, second)).reshape(*weights[0].shape[:2], *q.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(interpret: Any, x: Array, first: Array, second: Array) -> Array:
    return mosaic_gpu_read.read(x, first, second, interpret=interpret)


def _forward(interpret: Any, *given: Array) -> tuple[Array, Any]:
    return _apply(interpret, *given), given


def _backward(interpret: Any, kept: Any, g: Array) -> tuple[Array, ...]:
    """Makes what has a column for each hidden unit again."""
    del interpret

    def apply(x: Array, first: Array, second: Array) -> Array:
        return two_layers.apply((first[None], second[None]), x[None], x.dtype)[0]

    _, pull = jax.vjp(apply, *kept)
    return pull(g.astype(jnp.float32))


_apply.defvjp(_forward, _backward)
