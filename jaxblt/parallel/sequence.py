"""Islands over a sequence that is split along the mesh axis `seq`."""

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
      name: of the axis.
      size: among how many devices.
      manual: a `shard_map` around this has split it, so that arrays in hand are a device's own stretch.
    """

    name: str
    size: int
    manual: bool = False

    def whole(self, length: int) -> int:
        """Return the tokens of a whole row, of which arrays in hand have `length`."""
        return length * self.size if self.manual else length


def seq_axis(x: Any = None) -> SeqAxis | None:
    """Return the mesh's `seq` axis if it splits rows such as x.

    It is None without such an axis, or if it has one device. In a `shard_map` over `seq` rows are split if some array
    of the pytree x varies over it. With `check_vma=False` that is not known, and all are taken to be split. Without x
    rows are whole there.
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

    `what` names the caller, which reads whole rows.
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
    """Return `fn(sequenced, batched, shared)`, each device on its own rows and stretch.

    What `fn` needs of the other devices it exchanges itself, by collectives over the axis `seq_axis()` names.

    Args:
      fn: sees local arrays.
      sequenced: pytree of arrays with the batch first and time at `time_axis`.
      batched: pytree of arrays with a leading batch axis, each row whole on every device of the sequence.
      shared: pytree of arrays that every device has whole (filters, parameters).
      time_axis: 1 for [B, T, ...], 2 for [B, D, T].
      outputs: pytree prefix of what `fn` returns: True where it is split in time like `sequenced`, False where
        it is the same on all devices of the sequence (a final state; `fn` makes it so with a `psum` or alike).
      heads: as for `over_batch`, a prefix of `sequenced`.

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
    """Mark arrays as varying over `seq`, as an island's arguments do.

    Only if a `shard_map` around this has split it.
    """
    if not axis.manual:
        return sequenced
    leaves, tree = jax.tree.flatten(sequenced)
    return jax.tree.unflatten(tree, vary_alike(*leaves))


def made_split[T](make: Callable[[], T]) -> T:
    """Make arrays [B, T, ...], each device its own stretch; whole without a `seq` axis.

    Raises:
      ValueError: the rows or the stretches do not divide among the devices.
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
    """Gather every row of x whole on all devices, for integers counted along the sequence."""
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
