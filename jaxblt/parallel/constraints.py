"""The placement of arrays inside a model: activations by row and stretch, weights whole among the batch's devices.

Without these constraints the partitioner spreads the split of an FSDP weight through the model. Every device then
computes on a part of the width of all rows, as under tensor parallelism.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from jaxblt.parallel.islands import BATCH_AXES, SEQ_AXIS, open_axes
from jaxblt.parallel.rules import DEFAULT_RULES, axes_of


def by_token(x: Shaped[Array, "B T ..."], *, split: bool = True) -> Shaped[Array, "B T ..."]:
    """Keep rows of x on the batch's devices, tokens on the sequence's, and channels together.

    An axis of the mesh that does not divide its axis of x is left out, and so are those of an island around this.

    Args:
      x: activations.
      split: False keeps all tokens of a row on each of the sequence's devices, as a short call with a state does.
    """
    if not (free := open_axes()):
        return x
    rows = _dividing(x.shape[0], [axis for axis in BATCH_AXES if axis in free])
    tokens = _dividing(x.shape[1], [axis for axis in (SEQ_AXIS,) if split and axis in free])
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, tokens))


def whole_weight(weight: Float[Array, "..."], names: Sequence[str | None]) -> Float[Array, "..."]:
    """Gather a weight from the devices of the batch.

    Its gradient is summed into the shares that it came from. Heads and columns that `tensor` splits stay where they
    are.

    Args:
      weight: in the dtype of its product, so that no more bytes move than the product reads.
      names: logical names of its axes.
    """
    free = open_axes()
    split = _spec(weight.shape, names, free)
    whole = _spec(weight.shape, names, [axis for axis in free if axis not in BATCH_AXES])
    if split == whole:
        return weight
    # Constrain twice: the first is the transpose's last, a sum over devices of which only shares are kept
    weight = jax.lax.with_sharding_constraint(weight, split)
    return jax.lax.with_sharding_constraint(weight, whole)


def _spec(shape: tuple[int, ...], names: Sequence[str | None], free: Sequence[str]) -> PartitionSpec:
    """Return the axes among `free` that `DEFAULT_RULES` give to a weight's axes, each once."""
    entries, left = [], list(free)
    for size, name in zip(shape, names, strict=True):
        wanted = axes_of(DEFAULT_RULES.get(name)) if name is not None else ()
        found = _dividing(size, [axis for axis in wanted if axis in left])
        left = [axis for axis in left if axis not in (found or ())]
        entries.append(found)
    return PartitionSpec(*entries)


def _dividing(size: int, axes: Sequence[str]) -> tuple[str, ...] | None:
    """Return those of `axes`, from the first on, whose devices together divide `size`."""
    mesh, kept = jax.sharding.get_abstract_mesh(), []
    for axis in axes:
        if size % math.prod(mesh.shape[other] for other in (*kept, axis)) == 0:
            kept.append(axis)
    return tuple(kept) or None
