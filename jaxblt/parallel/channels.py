"""Whole rows of a device's own channels, and back: for convolutions as long as the sequence."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxblt.parallel.islands import batch_axes, check_rows, island
from jaxblt.parallel.sequence import SEQ_AXIS, check_divides, seq_axis

GROUPS = 4
"""Groups of channels that are exchanged one by one, so that one group travels while another is convolved."""


def over_channels(
    fn: Callable[[Any, Any, Any, Any], Float[Array, "B d T"]],
    u: Float[Array, "B D T"],
    per_channel: Any,
    shared: Any,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    groups: int = GROUPS,
) -> Float[Array, "B D T"]:
    """`fn(u, per_channel, shared, segment_ids)` with time split outside of it and channels split inside of it.

    Two all-to-alls, of u and of the result, each D T / n numbers a device. Segment ids are gathered by all: every
    device convolves whole rows.

    Args:
      fn: sees whole rows of its d channels, returns as much.
      u: split in time over the mesh axis `seq`.
      per_channel: pytree of arrays `[D, ...]` (taps, weights); each device gets those of its channels.
      shared: pytree of arrays that every device has whole.
      segment_ids: documents, or None.
      groups: at most so many groups of channels.

    Raises:
      ValueError: channels, tokens or rows do not divide among the devices.
    """
    axis, rows = seq_axis(), batch_axes() or None
    assert axis is not None
    check_divides((u, None if segment_ids is None else segment_ids[:, None]), axis, 2)
    check_rows(u, rows or ())
    channels = u.shape[1]
    if channels % axis.size:
        raise ValueError(
            f"{channels} channels do not divide among the {axis.size} devices of mesh axis {axis.name!r}, which "
            "filters longer than 512 taps need: use a width that is a multiple, a smaller axis, or ModalFilter"
        )
    groups = math.gcd(groups, channels // axis.size)

    def exchange(u: Array, per_channel: Any, shared: Any, ids: Array | None) -> Array:
        if ids is not None:
            ids = jax.lax.all_gather(ids, SEQ_AXIS, axis=1, tiled=True)
        batch, _, length = u.shape
        parts = u.reshape(batch, axis.size, groups, -1, length)
        mine = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), per_channel)
        done = [
            _swap(fn, parts[:, :, i], jax.tree.map(lambda x, i=i: x[i], mine), shared, ids)
            for i in range(groups)
        ]
        return jnp.stack(done, 2).reshape(u.shape)

    time = PartitionSpec(rows, None, axis.name)
    specs = (time, PartitionSpec(axis.name), PartitionSpec(), PartitionSpec(rows, axis.name))
    return island(exchange, specs, time)(u, per_channel, shared, segment_ids)


def _swap(
    fn: Callable[..., Array], u: Float[Array, "B n d t"], per_channel: Any, shared: Any, ids: Any
) -> Array:
    """A group of every device's channels from split in time to whole rows, through `fn`, and back."""
    batch, count, channels, length = u.shape
    rows = jax.lax.all_to_all(u, SEQ_AXIS, split_axis=1, concat_axis=3, tiled=True)
    y = fn(rows.reshape(batch, channels, count * length), per_channel, shared, ids)
    return jax.lax.all_to_all(y[:, None], SEQ_AXIS, split_axis=3, concat_axis=1, tiled=True)
