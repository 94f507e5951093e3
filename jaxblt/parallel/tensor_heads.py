"""Heads over `tensor`: islands in which each device runs its own heads of a mixer."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxblt.parallel.islands import (
    SEQ_AXIS,
    TENSOR_AXIS,
    batch_axes,
    check_rows,
    core_specs,
    island,
    open_axes,
)
from jaxblt.parallel.sequence import as_stretches, check_divides, seq_axis


def splits_heads(counts: tuple[int, ...]) -> bool:
    """Return whether `over_tensor` splits heads of these counts.

    `tensor` must divide all of them, except those of 1, which devices share.
    """
    size = jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1)
    several = [count for count in counts if count > 1]
    return TENSOR_AXIS in open_axes() and bool(several) and not any(count % size for count in several)


def over_tensor(
    fn: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    core: Any,
    streams: Any,
    segment_ids: Int[Array, "B T"] | None = None,
    carry: Any = None,
    *,
    time_axis: int,
    sequenced: bool,
) -> tuple[Any, Any]:
    """Return `fn(core, streams, segment_ids, carry) -> (y, after)` on own rows and heads.

    Args:
      fn: sees local arrays.
      core: a dataclass of weights; the fields that its `per_head` names have heads as their first axis.
      streams: pytree of arrays [B, T, H, ...], of which those of one head are whole on every device; or of channels
        [B, D, T] with `time_axis` 2, the channels of a head side by side.
      segment_ids: documents, or None.
      carry: pytree of arrays [B, H, ...] or [B, D, ...], or None.
      time_axis: of streams and y.
      sequenced: each device sees its own stretch of the sequence; a carry enters and leaves whole along it.

    Raises:
      ValueError: rows or tokens do not divide among the devices.
    """
    rows, axis = batch_axes() or None, seq_axis(streams)
    if sequenced and axis is not None:
        check_divides(streams, axis, time_axis)
        streams, segment_ids = as_stretches((streams, segment_ids), axis)
    check_rows((streams, segment_ids, carry), rows or ())
    time, size = SEQ_AXIS if sequenced else None, jax.sharding.get_abstract_mesh().shape[TENSOR_AXIS]

    def split(heads: str | None) -> PartitionSpec:
        return PartitionSpec(rows, *((time, heads) if time_axis == 1 else (heads, time)))

    by_stream = jax.tree.map(lambda x: split(None if x.shape[3 - time_axis] % size else TENSOR_AXIS), streams)
    by_head = PartitionSpec(rows, TENSOR_AXIS)
    specs = (core_specs(core, TENSOR_AXIS), by_stream, PartitionSpec(rows, time), by_head)
    apart = (SEQ_AXIS,) if axis is not None and not sequenced else ()
    made = island(fn, specs, (split(TENSOR_AXIS), by_head), apart=apart)
    return made(core, streams, segment_ids, carry)
