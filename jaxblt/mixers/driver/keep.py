"""Calls that look at more tokens than they keep.

A call with a state is a function, and no token of segment id 0 changes a bit of a state. So to look is to call and to
drop the state, and to keep is to call again with zeros behind what is kept:

    look    x0 x1 x2 x3 x4     y0 y1 y2 y3 y4     the state before them stays
    keep 3  x0 x1 x2 .  .                         the state behind x2

The compiler drops whatever a look computes for the state and whatever a keep computes for outputs. Nothing is rolled
back, so every mixer, stack, model and patcher can keep as it is.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int


def keep_first(segment_ids: Int[Array, "B T"], keep: Int[Array, "B"]) -> Int[Array, "B T"]:
    """Return segment ids with zeros behind the first `keep` positions of each row."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index < keep[:, None], segment_ids, 0)


def call_keeping(
    call: Callable[[Any, Any, Any], tuple[Any, Any]],
    inputs: Any,
    state: Any,
    segment_ids: Int[Array, "B T"],
    keep: Int[Array, "B"],
) -> tuple[Any, Any]:
    """Return outputs at all T tokens, and the state behind the first `keep` of each row.

    Args:
      call: (inputs, state, segment_ids) -> (outputs, state), of a mixer, a stack, a model or a patcher.
      inputs: of all T tokens.
      state: before them.
      segment_ids: documents of the tokens.
      keep: tokens of each row that the state takes, from 0 to T.
    """
    looked, _ = call(inputs, state, segment_ids)
    _, kept = call(inputs, state, keep_first(segment_ids, keep))
    return looked, kept
