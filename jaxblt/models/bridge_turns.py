"""Bridges in little memory: some blocks at a time, whose intermediates the backward pass makes again."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import DenyList
from jaxtyping import Array, Shaped

from jaxblt.parallel.sequence import seq_axis
from jaxblt.side_outputs import SIDE_OUTPUTS
from pallas_kernels.runtime import has_checked_ops


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
        variable_broadcast=DenyList((*SIDE_OUTPUTS, "intermediates")),
        split_rngs={},
        check_constancy_invariants=not has_checked_ops(),
    )
    _, found = looped(module, None, jax.tree.map(split, arrays))
    found = jnp.moveaxis(found, 0, 2)
    return found.reshape(found.shape[0], blocks, *found.shape[3:])


def _taken(blocks: int, chunk: int | None, axis: Any) -> int:
    """Return the most blocks up to `chunk` that divide all, and that divide among the devices of the sequence."""
    each = 1 if axis is None else axis.size
    if chunk is None or blocks % each:
        return blocks
    return max(n for n in range(each, blocks + 1, each) if blocks % n == 0 and n <= max(chunk, each))
