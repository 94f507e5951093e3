"""Checks of arrays on the host, where a caller hands them to a public function.

Shapes and dtypes are known while tracing and are always checked. Values are checked if they are there: inside `jit`,
and where another process holds a part of them, these checks cost nothing and see nothing. Ids and segment ids are seen
inside `jit`, too, within `jaxblt.checked_ops`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels.runtime import Range, check_documents, check_values


def on_host(array: Any) -> np.ndarray | None:
    """Return the values of an array, or None if it is traced or partly on another process."""
    if isinstance(array, Tracer) or not hasattr(array, "dtype"):
        return None
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return None
    return np.asarray(array)


def check_rows(name: str, array: Any) -> None:
    """Raise ValueError unless `array` has the axes of a batch of rows."""
    shape = np.shape(array)
    if len(shape) != 2:
        raise ValueError(
            f"{name} must have axes [rows, bytes], got shape {tuple(shape)}: write {name}[None] for one row"
        )


def check_ids(ids: Any, size: int) -> None:
    """Raise ValueError unless `ids` are whole numbers in 0..size-1."""
    check_whole("ids", ids)
    values = on_host(ids)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < size:
        raise ValueError(
            f"ids must lie in 0..{size - 1}, got {int(values.min())}..{int(values.max())}: "
            "jaxblt.data.encode makes ids of bytes"
        )
    check_values("bytes", {"ids": Range(0, size - 1, "jaxblt.data.encode makes ids of bytes")}, {"ids": ids})


def check_segments(segment_ids: Any) -> None:
    """Check that segment ids of bytes are contiguous whole numbers of at least 0.

    Bytes have no holes.
    """
    check_whole("segment_ids", segment_ids)
    values = on_host(segment_ids)
    if values is not None and values.size and values.min() < 0:
        raise ValueError(
            f"segment_ids of bytes are 1, 2, ... for documents and 0 for padding, got {int(values.min())}"
        )
    check_documents(segment_ids)


def check_entropies(entropies: Any) -> None:
    """Raise ValueError unless entropies are finite floats."""
    if not jnp.issubdtype(entropies.dtype, jnp.floating):
        raise ValueError(f"entropies must be floats in nats, got dtype {entropies.dtype}")
    values = on_host(entropies)
    if values is not None and not np.isfinite(values).all():
        row, place = (int(i) for i in np.argwhere(~np.isfinite(values))[0][-2:])
        raise ValueError(
            f"entropies must be finite, got {values[row, place]} in row {row} at byte {place}: the entropy model "
            "gave it, or the file that they were read from"
        )


def check_width(name: str, x: Any, width: int) -> None:
    """Raise ValueError unless `x` has three axes, the last of `width`."""
    if len(x.shape) != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} takes x of shape [rows, positions, {width}], got {tuple(x.shape)}")


def check_like(name: str, array: Any, ids: Any) -> None:
    """Raise ValueError unless `array` has the shape of ids.

    One of fewer rows would count for all of them.
    """
    if np.shape(array) != np.shape(ids):
        raise ValueError(f"{name} must have the shape of ids, {np.shape(ids)}, got {np.shape(array)}")


def check_whole(name: str, array: Any) -> None:
    """Raise ValueError unless `array` is an array of integers."""
    if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, jnp.integer):
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name} must be an integer array, got {kind}")
