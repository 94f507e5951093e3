"""Islands (`shard_map`s) over rows that are split along the mesh axis `seq`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from jaxblt.parallel.islands import SEQ_AXIS, batch_axes, check_rows, island, placed
from pallas_kernels.runtime import is_symbolic, may_vary, vary_alike


class SeqAxis(NamedTuple):
    """The mesh axis that splits the sequence.

    Attributes:
      name: name of the axis.
      size: number of devices along the axis.
      manual: True inside a `shard_map` over the axis: arrays are then a device's own shard of a row.
    """

    name: str
    size: int
    manual: bool = False

    def whole(self, length: int) -> int:
        """Return the length of a whole row, given the length of the arrays at hand."""
        return length * self.size if self.manual else length


def seq_axis(x: Any = None) -> SeqAxis | None:
    """Return the mesh's `seq` axis if it splits rows such as x.

    Return None without such an axis, or if it has one device. Inside a `shard_map` over `seq`, rows count as split if
    some array of the pytree x varies over the axis. With `check_vma=False` JAX does not know, and all arrays count as
    split. Without x rows count as whole there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape.get(SEQ_AXIS, 1)
    if size == 1:
        return None
    if SEQ_AXIS not in mesh.manual_axes:
        return SeqAxis(SEQ_AXIS, size)
    split = any(may_vary(leaf, SEQ_AXIS) for leaf in jax.tree.leaves(x))
    return SeqAxis(SEQ_AXIS, size, manual=True) if split else None


def check_whole_rows(x: Any, what: str) -> None:
    """Raise ValueError if a `shard_map` over `seq` has split rows such as x.

    `what` names the caller, which needs whole rows, in the message.
    """
    axis = seq_axis(x)
    if axis is not None and axis.manual:
        raise ValueError(
            f"{what} reads whole rows, and a shard_map over mesh axis {axis.name!r} has split them among {axis.size} "
            "devices: leave the axis out of its axis_names, or give every device the whole rows with check_vma=True"
        )


def over_sequence[T](
    fn: Callable[[Any, Any, Any], T],
    sequenced: Any,
    batched: Any = (),
    shared: Any = (),
    *,
    time_axis: int = 1,
    outputs: Any = True,
    heads: Any = False,
) -> T:
    """Return `fn(sequenced, batched, shared)`, computed by each device on its own rows and shard of the sequence.

    `fn` itself exchanges data with other devices, by collectives over the axis that `seq_axis()` returns.

    Args:
      fn: function of local arrays.
      sequenced: pytree of arrays with the batch first and time at `time_axis`; they are split in time.
      batched: pytree of arrays with a leading batch axis; every device of the sequence has whole rows of them.
      shared: pytree of arrays that every device has whole (filters, parameters).
      time_axis: 1 for [B, T, ...], 2 for [B, D, T].
      outputs: pytree prefix of the result of `fn`. True is for arrays that are split in time like `sequenced`. False is
        for arrays that are equal on all devices of the sequence, such as a final state that `fn` sums by `psum`.
      heads: pytree prefix of `sequenced`, as for `over_batch`.

    Raises:
      ValueError: the mesh splits no sequence, or the tokens or the rows do not divide among the devices.
    """
    axis, rows = seq_axis(sequenced), batch_axes()
    if axis is None:
        raise ValueError(
            "the mesh in force has no axis 'seq' of more than one device: take the local path, "
            "or set a mesh such as make_mesh(seq=8)"
        )
    check_divides(sequenced, axis, time_axis)
    sequenced = as_stretches(sequenced, axis)
    check_rows((sequenced, batched), rows)
    by_row = PartitionSpec(rows or None)
    specs = placed((rows or None, *(None,) * (time_axis - 1), axis.name), sequenced, heads)
    results = jax.tree.map(lambda timed: specs.result if timed else by_row, outputs)
    return island(fn, (specs.arrays, by_row, specs.shared), results)(sequenced, batched, shared)


def as_stretches[T](sequenced: T, axis: SeqAxis) -> T:
    """Mark arrays as varying over `seq`, like an island's arguments, if a `shard_map` around this has split them."""
    if not axis.manual:
        return sequenced
    leaves, tree = jax.tree.flatten(sequenced)
    return jax.tree.unflatten(tree, vary_alike(*leaves))


def made_split[T](make: Callable[[], T]) -> T:
    """Make arrays [B, T, ...], of which each device makes its own shard; whole without a `seq` axis.

    Raises:
      ValueError: the rows or the sequence do not divide among the devices.
    """
    axis, rows = seq_axis(), batch_axes()
    if axis is None:
        return make()
    shapes = jax.eval_shape(make)
    check_divides(shapes, axis)
    check_rows(shapes, rows)
    split = PartitionSpec(rows or None, axis.name)
    return jax.jit(lambda: jax.lax.with_sharding_constraint(make(), split))()


def whole_rows(x: Shaped[Array, "B T"]) -> Shaped[Array, "B T"]:
    """Gather whole rows of x on all devices, for integers that are counted along the sequence."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(batch_axes() or None))


def check_divides(sequenced: Any, axis: SeqAxis, time_axis: int = 1) -> None:
    """Raise ValueError unless time divides among the devices.

    The message names the length, the devices and the fix.
    """
    if axis.manual:
        return
    for length in dict.fromkeys(leaf.shape[time_axis] for leaf in jax.tree.leaves(sequenced)):
        if is_symbolic(length):
            raise ValueError(
                f"a sequence of symbolic length {length} cannot be split among the devices of mesh axis {axis.name!r}: "
                "export for a length that is known, or without the mesh"
            )
        if length % axis.size:
            raise ValueError(
                f"a sequence of T = {length} tokens does not divide among the {axis.size} devices of mesh axis "
                f"{axis.name!r}: pad it to {-(-length // axis.size) * axis.size}, or use a smaller axis"
            )
