"""Carries: what a recurrence hands from one device's stretch of the sequence to the next."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.parallel.sequence import SEQ_AXIS


def fold_before[C](join: Callable[[C, Any], C], start: C, summary: Any, *, reverse: bool = False) -> C:
    """What the devices before this one carry into its stretch: join(...join(join(start, s_0), s_1)..., s_{i-1}).

    Only inside an island over the sequence. The summaries are gathered by all, a single exchange, and each device
    folds those before it. A scan by doublings moves fewer bytes (log2 n summaries instead of n - 1) but waits for
    log2 n exchanges one after another, and at a few hundred KB it is the wait that costs.

    Args:
      join: (carry, summary of the next device) -> carry; elementwise work, done n - 1 times.
      start: the carry before the first position.
      summary: pytree, what this device's stretch does to a carry: of one size whatever the stretch.
      reverse: the last device comes first.
    """
    everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, SEQ_AXIS), summary)
    count, index = jax.lax.axis_size(SEQ_AXIS), jax.lax.axis_index(SEQ_AXIS)
    place = count - 1 - index if reverse else index
    carry = start
    for i in range(count - 1):
        device = count - 1 - i if reverse else i
        after = join(carry, jax.tree.map(lambda x, device=device: x[device], everyone))
        carry = jax.tree.map(lambda new, old, i=i: jnp.where(i < place, new, old), after, carry)
    return carry


def from_last[C](x: C) -> C:
    """The last device's x, on all devices of the sequence."""
    mine = jax.lax.axis_index(SEQ_AXIS) == jax.lax.axis_size(SEQ_AXIS) - 1
    return jax.tree.map(
        lambda leaf: jax.lax.psum(jnp.where(mine, leaf, jnp.zeros((), leaf.dtype)), SEQ_AXIS), x
    )
