"""Products below a router: how its codes meet their tokens, and where its state lies in a stack's.

An adapter has one router, which reads the stack's input, or one in each block, which reads that block's.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxblt.mixers.driver.sequence import splits_call
from jaxblt.models.adapter import StackAdapter
from jaxblt.show import show


@flax.struct.dataclass
class BlockState:
    """State of a block with a router of its own: the mixer's, and the router's."""

    mixer: Any
    router: Any

    __repr__ = show


def call_routed(
    router: Callable[..., tuple[Any, Any]],
    x: Any,
    segment_ids: Any,
    positions: Any,
    state: Any,
    side: Any,
    through: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
) -> tuple[Any, Any, Any]:
    """Run `through(x, segment_ids, positions, code)` at the router's codes.

    Returns its results and the router's state.
    """
    code, after = router(x, segment_ids=segment_ids, state=state, side=side)
    order = None
    if state is not None and segment_ids is not None and x.shape[1] > 1 and not splits_call(x.shape[1]):
        # Put tokens in front as mixers do in such calls: a code has to meet its token in every product
        order = jnp.argsort(segment_ids == 0, axis=1, stable=True).astype(jnp.int32)
        x, segment_ids, positions, code = (_take(order, a) for a in (x, segment_ids, positions, code))
    y, left = through(x, segment_ids, positions, code)
    return y if order is None else _take(jnp.argsort(order, axis=1).astype(jnp.int32), y), left, after


def _take(order: Int[Array, "B T"], x: Any) -> Any:
    """Reorder the tokens of x; None stays None."""
    return x if x is None else jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)


def check_routers(adapter: StackAdapter | None, state: Any, batch_size: int, dim: int) -> None:
    """Raise ValueError for a `StackState` whose routers' states are not those of the adapter.

    They would be lost.
    """
    made = None if adapter is None else jax.eval_shape(lambda: adapter.init_state(batch_size, dim))
    of_blocks = adapter is not None and adapter.of_blocks
    of_stack, of_block = (None, made) if of_blocks else (made, None)
    _check("the stack", state.router, of_stack)
    if state.scanned:
        blocks = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.periods)
    else:
        blocks = [block for period in state.periods for block in period]
    for i, block in enumerate((*blocks, *state.rest)):
        _check(f"block {i}", block.router if isinstance(block, BlockState) else None, of_block)


def _check(where: str, held: Any, own: Any) -> None:
    kinds = [(jax.tree.structure(tree), _told(tree)) for tree in (held, own)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the state holds {kinds[0][1]} for {where}, and the adapter has {kinds[1][1]} there: make it by "
            "init_stack_state of the same config"
        )


def _told(router: Any) -> str:
    """Describe a router's state in words."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(router)]
    return "no router" if router is None else f"a router with arrays of shapes {shapes}"
