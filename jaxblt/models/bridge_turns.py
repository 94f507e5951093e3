"""Bridges in little memory: some blocks at a time, whose intermediates the backward pass makes again."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList
from jaxtyping import Array, Float, Shaped

from jaxblt.layers import FP8
from jaxblt.parallel.sequence import seq_axis
from jaxblt.side_outputs import SIDE_OUTPUTS
from pallas_kernels.runtime import OwnGradient, has_checked_ops


def in_turns(
    fn: Callable[..., Array], module: nn.Module, arrays: tuple[Any, ...], *, chunk: int | None
) -> Array:
    """Return `fn(module, *arrays)`, computed for some of the blocks at a time, one after the other.

    Each turn takes every n-th block, so that devices that split the blocks work on their own in every turn.

    Args:
      fn: treats each block by itself.
      module: whose parameters `fn` uses.
      arrays: [B, N, ...], N blocks.
      chunk: blocks of a turn at the most; None for all.
    """
    blocks = jax.tree.leaves(arrays)[0].shape[1]
    taken = _taken(blocks, chunk, seq_axis(arrays))
    if taken == blocks or module.is_initializing():
        return fn(module, *arrays)

    def split(x: Shaped[Array, "B N *S"]) -> Shaped[Array, "turns B taken *S"]:
        return jnp.moveaxis(x.reshape(x.shape[0], taken, blocks // taken, *x.shape[2:]), 2, 0)

    def turn(module: nn.Module, carry: None, own: tuple[Any, ...]) -> tuple[None, Array]:
        return carry, fn(module, *own)

    looped = nn.scan(
        nn.remat(turn, prevent_cse=False),
        variable_axes={FP8: 0},
        variable_broadcast=DenyList((*SIDE_OUTPUTS, "intermediates", FP8)),
        split_rngs={},
        check_constancy_invariants=not has_checked_ops(),
    )
    # Give each turn its own copy of what FP8 remembers: one for all would observe the sum of the turns' largest entries
    each = partial(jax.tree.map, lambda amax: _for_turns(amax, blocks // taken))
    looped = nn.map_variables(looped, FP8, trans_in_fn=each)
    _, found = looped(module, None, jax.tree.map(split, arrays))
    found = jnp.moveaxis(found, 0, 2)
    return found.reshape(found.shape[0], blocks, *found.shape[3:])


def _copies(amax: Float[Array, "*S"], turns: int) -> Float[Array, "turns *S"]:
    return jnp.broadcast_to(amax, (turns, *amax.shape))


def _copies_forward(amax: Float[Array, "*S"], turns: int) -> tuple[Float[Array, "turns *S"], None]:
    return _copies(amax, turns), None


def _copies_backward(
    turns: int, saved: None, observed: Float[Array, "turns *S"]
) -> tuple[Float[Array, "*S"]]:
    """Return what all turns observed: the largest of what each did."""
    return (jnp.max(observed, 0),)


_for_turns = OwnGradient(_copies, nondiff_argnums=(1,))
_for_turns.defvjp(_copies_forward, _copies_backward)


def _taken(blocks: int, chunk: int | None, axis: Any) -> int:
    """Return the most blocks up to `chunk` that divide all, and that divide among the devices of the sequence."""
    each = 1 if axis is None else axis.size
    if chunk is None or blocks % each:
        return blocks
    return max(n for n in range(each, blocks + 1, each) if blocks % n == 0 and n <= max(chunk, each))
