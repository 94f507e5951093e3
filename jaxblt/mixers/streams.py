"""Islands for channel-major streams, [B, D, T]: local rows, or local stretches of them under a `seq` axis."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.parallel.halo import history, splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis


def over_streams(
    fn: Callable[[Any, Any, Any], Array],
    streams: Any,
    segment_ids: Int[Array, "B T"] | None,
    shared: Any = (),
) -> Array:
    """`fn(streams, segment_ids, shared)` -> [B, D, T], each device on its own rows and stretch of the sequence.

    Without a `seq` axis rows are whole; `fn` tells by `splits_sequence()` and then asks its neighbours for the rest.
    """
    if seq_axis() is None:
        return over_batch(lambda rows, shared: fn(rows[0], rows[1], shared), (streams, segment_ids), shared)
    row = None if segment_ids is None else segment_ids[:, None]

    def island(sequenced: Any, _: Any, shared: Any) -> Array:
        streams, row = sequenced
        return fn(streams, None if row is None else row[:, 0], shared)

    return over_sequence(island, (streams, row), (), shared, time_axis=2)


def local_alignment(alignment: int, length: int) -> int:
    """The grid on which documents start in the array that an island sees: a stretch may begin between its lines."""
    return math.gcd(alignment, length) if splits_sequence() else alignment


def from_outside(
    conv: Callable[[Float[Array, "B D S"]], Float[Array, "B D S"]],
    u: Float[Array, "B D T"],
    segment_ids: Int[Array, "B T"] | None,
    reach: int,
    *,
    reverse: bool = False,
) -> Float[Array, "B D T"]:
    """What the `reach` inputs before a device's stretch add to its causal convolution; zero if rows are whole.

    A convolution is linear: that of the neighbours' last inputs, on the few steps that they reach, is added to that
    of the device's own, whose inputs need no copy with the neighbours' in front.

    Args:
      conv: the convolution without gates and skip connection.
      u: inputs, zero at holes and padding if there are several documents.
      segment_ids: documents, or None for one.
      reach: taps - 1.
      reverse: rows are read from the end; `conv` gets the reversed inputs.
    """
    past = history(u, segment_ids, reach, reverse=reverse)
    if past is None:
        return jnp.zeros_like(u)
    length = u.shape[-1]
    size = min(length, reach)
    added = conv(jnp.pad(past, ((0, 0), (0, 0), (0, size))))[..., -size:]
    added = jnp.pad(added, ((0, 0), (0, 0), (0, length - size)))
    added = jnp.flip(added, -1) if reverse else added
    if segment_ids is None:
        return added
    edge = jnp.abs(segment_ids[:, -1:] if reverse else segment_ids[:, :1])
    return jnp.where((segment_ids == edge)[:, None], added, jnp.zeros((), added.dtype))
