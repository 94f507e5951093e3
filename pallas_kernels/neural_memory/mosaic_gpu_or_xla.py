"""Values by the Hopper kernels where no derivative is taken; where one is, values and derivatives by XLA.

The kernels are faster forward, and slower forward and backward together.
"""

from functools import partial
from typing import Any

import jax

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.neural_memory.mosaic_gpu import neural_memory_mosaic_gpu
from pallas_kernels.neural_memory.xla import neural_memory_xla


def neural_memory_mosaic_gpu_or_xla(
    *streams: Any,
    segment_ids: Any = None,
    initial_state: Any = None,
    interpret: Any = None,
    **options: Any,
) -> Any:
    """Compute `neural_memory` by kernels, or by XLA where there are derivatives.

    `interpret` is as in `neural_memory_mosaic_gpu`.
    """
    flat, tree = jax.tree.flatten((streams, segment_ids, initial_state))
    arrays = jax.tree.unflatten(tree, vary_alike(*flat))
    return _call(interpret, tuple(options.items()), arrays)


@partial(OwnGradient, nondiff_argnums=(0, 1))
def _call(interpret: Any, options: tuple[tuple[str, Any], ...], arrays: Any) -> Any:
    run = partial(neural_memory_mosaic_gpu, interpret=interpret)
    return _with(run, options, arrays)


def _with(run: Any, options: tuple[tuple[str, Any], ...], arrays: Any) -> Any:
    streams, segment_ids, initial_state = arrays
    return run(*streams, segment_ids=segment_ids, initial_state=initial_state, **dict(options))


def _forward(interpret: Any, options: tuple[tuple[str, Any], ...], arrays: Any) -> tuple[Any, Any]:
    del interpret
    return jax.vjp(partial(_with, neural_memory_xla, options), arrays)


def _backward(interpret: Any, options: tuple[tuple[str, Any], ...], pull: Any, g: Any) -> tuple[Any, ...]:
    del interpret, options
    return pull(g)


_call.defvjp(_forward, _backward)
