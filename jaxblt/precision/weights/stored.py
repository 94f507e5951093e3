"""Quantised kernels as folders keep them: dicts that name the scheme, so that a checkpoint says what it holds."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.precision.formats import E4M3
from jaxblt.precision.weights.kernel import SCHEMES, Quantized

ARRAYS = ("values", "scale", "inputs", "middle")
DTYPES = {"int4": jnp.uint8, "fp8": E4M3.dtype}
"""Of values in schemes other than 8-bit integers."""


def to_stored(params: Any) -> Any:
    """Return parameters with each quantised kernel as {scheme: {"values": ..., "scale": ...}}."""
    if isinstance(params, Quantized):
        arrays = {name: getattr(params, name) for name in ARRAYS}
        return {params.scheme: {name: array for name, array in arrays.items() if array is not None}}
    if not isinstance(params, Mapping):
        return params
    return {name: to_stored(below) for name, below in params.items()}


def from_stored(params: Any) -> Any:
    """Undo `to_stored`, also for shapes."""
    if not isinstance(params, Mapping):
        return params
    if len(params) == 1:
        ((name, arrays),) = params.items()
        if (
            name in SCHEMES
            and isinstance(arrays, Mapping)
            and {"values", "scale"} <= set(arrays) <= set(ARRAYS)
        ):
            return Quantized(**arrays, scheme=name)
    return {name: from_stored(below) for name, below in params.items()}


def shapes_as_stored(shapes: Any, held: Any) -> Any:
    """Return shapes of parameters as a folder keeps them, where it holds quantised kernels.

    Args:
      shapes: of parameters that are not quantised.
      held: names, shapes and dtypes of the folder, of `from_stored`.

    Raises:
      ValueError: the values of a kernel have another dtype than their scheme's.
    """
    if isinstance(held, Quantized):
        if held.values.dtype != DTYPES.get(held.scheme, jnp.int8):
            raise ValueError(
                f"a kernel in {held.scheme!r} has values of {held.values.dtype}: quantise the run again"
            )
        return to_stored(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held))
    if not isinstance(shapes, Mapping) or not isinstance(held, Mapping):
        return shapes
    return {name: shapes_as_stored(below, held.get(name)) for name, below in shapes.items()}
