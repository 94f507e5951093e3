"""Rows of a decoding state, taken out and put in: every row of a state stands by itself.

The rows of a state lie along axis 0 of its arrays, with two exceptions. A scanned stack has its layers before them.
Entropies from contexts of bounded length read each row twice, so their model has 2 B rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxblt.models import StackState
from jaxblt.patching import ContextState

OnLeaf = Callable[..., Array]
"""(axis, copies, array, ...) -> array, of arrays whose rows lie along `axis`, in as many copies one after another."""


def take_rows(state: Any, rows: Int[Array, "N"]) -> Any:
    """Return a state of these rows of a state, in this order.

    Args:
      state: of a mixer, a stack, a model, a patcher, an entropy model or a decoder.
      rows: their numbers.
    """

    def take(axis: int, copies: int, array: Array) -> Array:
        return jnp.take(array, _places(rows, array.shape[axis], copies), axis)

    return _on_rows(take, 0, 1, state)


def put_rows(state: Any, rows: Int[Array, "N"], part: Any) -> Any:
    """Return a state whose rows of these numbers are those of `part`; the others keep every bit.

    Args:
      state: as for `take_rows`.
      rows: their numbers, each once; parts of numbers far beyond all rows are dropped.
      part: a state of as many rows, made for the same capacity.
    """

    def put(axis: int, copies: int, array: Array, part: Array) -> Array:
        index = (slice(None),) * axis + (_places(rows, array.shape[axis], copies),)
        return array.at[index].set(part, unique_indices=True)

    return _on_rows(put, 0, 1, state, part)


def _places(rows: Int[Array, "N"], size: int, copies: int) -> Int[Array, "M"]:
    """Return where the rows stand along an axis of `size`."""
    return jnp.concatenate([rows + copy * (size // copies) for copy in range(copies)])


def _on_rows(change: OnLeaf, axis: int, copies: int, state: Any, *others: Any) -> Any:
    """Call `change` with the arrays of the states."""

    def visit(part: Any, *others: Any) -> Any:
        if isinstance(part, StackState):
            along = axis + part.scanned
            layers = _on_rows(change, along, copies, part.periods, *(x.periods for x in others))
            rest = _on_rows(change, axis, copies, part.rest, *(x.rest for x in others))
            router = _on_rows(change, axis, copies, part.router, *(x.router for x in others))
            return replace(part, periods=layers, rest=rest, router=router)
        if isinstance(part, ContextState):
            model = _on_rows(change, axis, 2 * copies, part.model, *(x.model for x in others))
            place = [part.position, part.last_segment], *([x.position, x.last_segment] for x in others)
            return ContextState(model, *_on_rows(change, axis, copies, *place))
        return change(axis, copies, part, *others)

    return jax.tree.map(visit, state, *others, is_leaf=lambda x: isinstance(x, StackState | ContextState))
