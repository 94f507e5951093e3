"""Halos: the positions just before or behind a device's own stretch of the sequence, fetched from its neighbours."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxblt.parallel.sequence import SEQ_AXIS, over_sequence, seq_axis


def splits_sequence(x: Any) -> bool:
    """Return whether arrays such as x are a device's own stretch of the sequence.

    They are inside an island or another `shard_map` over `seq`.
    """
    axis = seq_axis(x)
    return axis is not None and axis.manual


def by_stretch[T](fn: Callable[[Any], T], sequenced: Any) -> T:
    """Return `fn(sequenced)` on each device's own stretch of the sequence.

    It gets whole rows if no `seq` axis splits them.

    Args:
      fn: fetches what it needs from its neighbours if `splits_sequence(x)`; returns arrays `[B, T, ...]`.
      sequenced: pytree of arrays `[B, T, ...]`.
    """
    if seq_axis(sequenced) is None:
        return fn(sequenced)
    return over_sequence(lambda own, *_: fn(own), sequenced)


def before(x: Shaped[Array, "..."], size: int, *, axis: int) -> Shaped[Array, "..."]:
    """Fetch the `size` positions before this device's, oldest first.

    There are zeros before the start of the sequence. Call it inside an island over the sequence. It takes one exchange
    for each device that the halo reaches, of only these positions. The gradient sends as much the other way.

    Args:
      x: this device's positions.
      size: of the halo, at least 1; may span several devices.
      axis: the time axis of x.
    """
    return _halo(x, size, axis, 1)


def behind(x: Shaped[Array, "..."], size: int, *, axis: int) -> Shaped[Array, "..."]:
    """Fetch the `size` positions behind this device's, in order.

    There are zeros behind the end; otherwise see `before`.
    """
    return _halo(x, size, axis, -1)


def _halo(x: Array, size: int, axis: int, step: int) -> Array:
    own, count = x.shape[axis], jax.lax.axis_size(SEQ_AXIS)
    received = []
    for hop in range(1, -(-size // own) + 1):
        wanted = min(size - (hop - 1) * own, own)
        start = own - wanted if step == 1 else 0
        edge = jax.lax.slice_in_dim(x, start, start + wanted, axis=axis)
        pairs = [(i, i + step * hop) for i in range(count) if 0 <= i + step * hop < count]
        # Send zeros to a device that nobody sends to
        received.append(jax.lax.ppermute(edge, SEQ_AXIS, pairs) if pairs else jnp.zeros_like(edge))
    return jnp.concatenate(received[::-step], axis)
