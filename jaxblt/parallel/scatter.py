"""Whole rows of a device's own heads or channels, for mixers whose states cannot be joined along the sequence."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxblt.parallel.islands import batch_axes, check_rows, core_specs, island
from jaxblt.parallel.sequence import SEQ_AXIS, SeqAxis, as_stretches, check_divides, seq_axis


def over_heads(
    fn: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    core: Any,
    streams: Any,
    segment_ids: Int[Array, "B T"] | None = None,
    carry: Any = None,
    *,
    time_axis: int,
) -> tuple[Any, Any]:
    """Return `fn(core, streams, segment_ids, carry) -> (y, after)` with heads split inside.

    Outside of it time is split. Two all-to-alls, of the streams and of y, each move a device's share of the numbers.
    Segment ids are gathered, so that every device runs whole rows of its heads. A carry enters and leaves whole.

    Args:
      fn: sees whole rows of some heads.
      core: a dataclass of weights; the fields that its `per_head` names have heads as their first axis. `groups`, if it
        has them, are groups of a device's heads that travel one by one, so that one is exchanged while another is run.
      streams: pytree of arrays [B, T, H, ...], or of channels [B, D, T] with `time_axis` 2.
      segment_ids: documents, or None.
      carry: pytree of arrays [B, H, ...] or [B, D, ...], or None.
      time_axis: of streams and y.

    Raises:
      ValueError: heads, tokens or rows do not divide among the devices.
    """
    axis, rows = seq_axis(streams), batch_axes() or None
    assert axis is not None
    streams, segment_ids = as_stretches((streams, segment_ids), axis)
    head_axis = 3 - time_axis
    check_divides(streams, axis, time_axis)
    check_rows(streams, rows or ())
    heads = jax.tree.leaves(streams)[0].shape[head_axis]
    _check_heads(heads, axis.size, "channels" if time_axis == 2 else "heads")
    groups = math.gcd(getattr(core, "groups", 1), heads // axis.size)
    send = _Swap(axis.size, groups, time_axis, head_axis)

    def exchange(streams: Any, ids: Any, carry: Any, core: Any) -> tuple[Any, Any]:
        if axis.manual:
            core = _of_device(core, axis)
        ids = None if ids is None else jax.lax.all_gather(ids, SEQ_AXIS, axis=1, tiled=True)
        done = []
        for i in range(groups):
            own = _of_group(core, groups, i)
            held = jax.tree.map(lambda x, i=i: jnp.split(x, groups, axis=1)[i], carry)
            y, after = fn(own, jax.tree.map(lambda x, i=i: send.there(x, i), streams), ids, held)
            done.append((jax.tree.map(send.back, y), after))
        y = jax.tree.map(lambda *parts: send.joined(parts), *(y for y, _ in done))
        return y, jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *(after for _, after in done))

    time = PartitionSpec(rows, *(None,) * (time_axis - 1), axis.name)
    by_head = PartitionSpec(rows, axis.name)
    specs = (time, by_head, by_head, core_specs(core, axis.name))
    y, after = island(exchange, specs, (time, by_head))(streams, segment_ids, carry, core)
    whole = PartitionSpec(rows)
    return y, jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), after)


@dataclasses.dataclass(frozen=True)
class _Swap:
    """A group of every device's heads from split in time to whole rows, and back."""

    devices: int
    groups: int
    time: int
    head: int

    def there(self, x: Array, group: int) -> Array:
        """Swap [..., H, ..., t] for the group's heads of this device, with all of time."""
        shape = list(x.shape)
        shape[self.head : self.head + 1] = [self.devices, self.groups, -1]
        part = jax.lax.index_in_dim(x.reshape(shape), group, self.head + 1, keepdims=False)
        merged = part.reshape(*x.shape[: self.head], -1, *x.shape[self.head + 1 :])
        return jax.lax.all_to_all(merged, SEQ_AXIS, self.head, self.time, tiled=True)

    def back(self, y: Array) -> Array:
        """Swap all of time of this device's heads for its time of all devices' heads of the group."""
        return jax.lax.all_to_all(y, SEQ_AXIS, self.time, self.head, tiled=True)

    def joined(self, parts: tuple[Array, ...]) -> Array:
        """Join the groups' results to one array, heads in their order."""
        split = [x.reshape(*x.shape[: self.head], self.devices, -1, *x.shape[self.head + 1 :]) for x in parts]
        joined = jnp.stack(split, self.head + 1)
        return joined.reshape(*parts[0].shape[: self.head], -1, *parts[0].shape[self.head + 1 :])


def _of_device(core: Any, axis: SeqAxis) -> Any:
    """Cut this device's heads from a core that is whole on every device."""
    return _of_group(core, axis.size, jax.lax.axis_index(axis.name))


def _of_group(core: Any, groups: int, group: Any) -> Any:
    names = getattr(core, "per_head", ())
    cut = lambda x: x.reshape(groups, -1, *x.shape[1:])[group]  # noqa: E731
    return dataclasses.replace(core, **{name: jax.tree.map(cut, getattr(core, name)) for name in names})


def _check_heads(heads: int, devices: int, kind: str) -> None:
    if heads % devices:
        raise ValueError(
            f"{heads} {kind} do not divide among the {devices} devices of mesh axis {SEQ_AXIS!r}, which mixers need "
            "whose rows cannot be joined (filters longer than 512 taps, steps strictly in order): use a multiple, a "
            "smaller axis, or a mixer with a carry such as Hyena with ModalFilter"
        )
