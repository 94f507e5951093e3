"""Small arrays of a tree put together: programs are called with fewer arrays, and loops that carry them copy fewer.

A loop copies each array that it carries by a kernel of its own, if its new value is made while the old one is read.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxblt.show import show

SMALL = 16_384
"""Bytes of the largest arrays that are put together: counts of rows, and not what rows hold."""

SMALL_COUNTS = 1_024
"""Bytes of the largest arrays of integers. Longer ones are times of a cache's slots: a token writes them in place."""


@flax.struct.dataclass
class Packed:
    """The arrays of a tree, of which small ones of one shape and dtype are one.

    Attributes:
      arrays: one for each of `places`.
      places: which arrays of the tree each holds, by their numbers.
      structure: of the tree.
    """

    arrays: tuple[Any, ...]
    places: tuple[tuple[int, ...], ...] = flax.struct.field(pytree_node=False)
    structure: Any = flax.struct.field(pytree_node=False)

    __repr__ = show

    def unpack(self) -> Any:
        """Return the tree."""
        found = {}
        for array, place in zip(self.arrays, self.places, strict=True):
            found |= dict(zip(place, array if len(place) > 1 else [array], strict=True))
        return jax.tree.unflatten(self.structure, [found[i] for i in range(len(found))])


def pack_small(tree: Any) -> Packed:
    """Return the tree with its small arrays put together, those of one shape and dtype."""
    leaves, structure = jax.tree.flatten(tree)
    places: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        most = SMALL_COUNTS if jnp.issubdtype(leaf.dtype, jnp.integer) else SMALL
        is_small = leaf.size * leaf.dtype.itemsize <= most
        places.setdefault((leaf.shape, leaf.dtype) if is_small else i, []).append(i)
    chosen = [[leaves[i] for i in group] for group in places.values()]
    arrays = [jnp.stack(group) if len(group) > 1 else group[0] for group in chosen]
    return Packed(tuple(arrays), tuple(map(tuple, places.values())), structure)
