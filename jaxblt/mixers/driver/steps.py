"""The loop over tokens of a core in which each token needs the carry of the one before.

Such a core has no `join`. Its weights and streams have heads as an axis, so that a mesh can scatter them over `seq`.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxblt.mixers.driver.base import select_rows
from jaxblt.mixers.driver.marks import Marks
from pallas_kernels.runtime import is_symbolic


def take_steps(
    step: Callable[[Any, Any], tuple[Any, Any]],
    start: Any,
    streams: Any,
    marks: Marks,
    carry: Any,
    *,
    unroll: int = 1,
    remat: bool = False,
) -> tuple[Any, Any]:
    """Take every token by `step`; return outputs `[B, T, ...]` and the carry behind them.

    A document begins with `start`. Holes and padding leave the carry as it is, bit by bit. The driver zeroes the
    outputs there.

    Args:
      step: (carry, a token of the streams) -> (carry, y); batched, without the axis of time.
      start: the carry before a document, `[B, ...]` a leaf.
      streams: pytree of arrays `[B, T, ...]`.
      marks: what the positions are.
      carry: before the first position; None for `start`.
      unroll: steps that are compiled as one.
      remat: the backward pass computes a step again, from the carry before it, instead of keeping its intermediates.
    """

    def guarded(carry: Any, token: Any) -> tuple[Any, Any]:
        inputs, content, new = token
        before = carry if new is None else select_rows(new, start, carry)
        after, y = step(before, inputs)
        return after if content is None else select_rows(content, after, before), y

    body = jax.checkpoint(guarded, prevent_cse=False) if remat else guarded
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (streams, marks.content, marks.new))
    # Do not unroll a loop of unknown length: it cannot be cut into groups of steps and a rest
    unroll = 1 if is_symbolic(jax.tree.leaves(streams)[0].shape[1]) else unroll
    after, y = jax.lax.scan(body, start if carry is None else carry, tokens, unroll=unroll)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), y), after


def per_block(init: nn.initializers.Initializer, blocks: int) -> nn.initializers.Initializer:
    """Return an initialiser of arrays of matrices, each of which `init` draws by itself.

    The first `blocks` axes count the matrices.
    """

    def draw(key: Array, shape: Any, dtype: Any = jnp.float32) -> Shaped[Array, "..."]:
        keys = jax.random.split(key, math.prod(shape[:blocks]))
        drawn = jax.vmap(lambda key: init(key, tuple(shape[blocks:]), dtype))(keys)
        return drawn.reshape(tuple(shape))

    return draw


def check_causal(config: Any) -> None:
    """Raise ValueError unless a config that steps forward is causal."""
    if not config.causal:
        raise ValueError(
            f"{type(config).__name__} steps forward only, got causal=False: use Hyena or attention, or causal=True"
        )


def check_divides(config: Any) -> None:
    """Raise ValueError unless a width is given or divides among the heads."""
    if config.head_dim is None and config.dim % config.num_heads:
        raise ValueError(
            f"dim {config.dim} does not divide among num_heads = {config.num_heads}: set head_dim"
        )
