"""Carries: what a recurrence hands from one device's stretch of the sequence to the next."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxblt.parallel.sequence import SEQ_AXIS


def exclusive_scan[C](
    join: Callable[[C, Any], C], start: C, summary: Any, *, reverse: bool = False, hops: int | None = None
) -> C:
    """Return what the devices before this one carry into its stretch.

    It is join(...join(join(start, s_0), s_1)..., s_{i-1}). Call it inside an island over the sequence. One exchange
    gathers the summaries on all devices, and each device folds those before it. A scan by doublings moves fewer bytes
    (log2 n summaries instead of n - 1). It waits for log2 n exchanges one after another, and at a few hundred KB the
    waits cost most.

    Args:
      join: (carry, summary of the next device) -> carry; done n - 1 times, elementwise or a product of small matrices.
      start: the carry before the first position.
      summary: pytree, the effect of this device's stretch on a carry. Its size does not depend on the stretch.
      reverse: the last device comes first.
      hops: how many devices back a carry reaches, if not all. Only their summaries are sent, by neighbours.
    """
    count, index = jax.lax.axis_size(SEQ_AXIS), jax.lax.axis_index(SEQ_AXIS)
    place = count - 1 - index if reverse else index
    if hops is not None and (hops == 1 or hops < count - 1):
        came = [_from_behind(summary, hop, reverse=reverse) for hop in range(hops, 0, -1)]
        first = place - hops
    else:
        everyone = jax.tree.map(lambda x: jax.lax.all_gather(x, SEQ_AXIS), summary)
        order = range(count - 1, 0, -1) if reverse else range(count - 1)
        came = [jax.tree.map(lambda x, i=i: x[i], everyone) for i in order]
        first = jnp.zeros_like(place)
    carry = start
    for i, effect in enumerate(came):
        sender = first + i
        there = (sender >= 0) & (sender < place)
        after = join(carry, effect)
        carry = jax.tree.map(lambda new, old, there=there: jnp.where(there, new, old), after, carry)
    return carry


def _from_behind(x: Any, hop: int, *, reverse: bool) -> Any:
    """Fetch x of the device `hop` places before this one in reading order; zeros without one."""
    count, step = jax.lax.axis_size(SEQ_AXIS), -hop if reverse else hop
    pairs = [(i, i + step) for i in range(count) if 0 <= i + step < count]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, SEQ_AXIS, pairs), x)


def at_end[C](carry: C, takes: Bool[Array, "B"] | None, otherwise: C) -> C:
    """Return each row's carry behind the device that holds its last token, on all devices.

    Rows without any token get `otherwise`.

    Args:
      carry: behind this device's stretch.
      takes: rows of which this device holds a token; None for all.
      otherwise: what every device has.
    """
    index = jax.lax.axis_index(SEQ_AXIS)
    if takes is None:
        mine = jnp.reshape(index == jax.lax.axis_size(SEQ_AXIS) - 1, (1,))
        last = None
    else:
        here = jnp.where(takes, index, -1)
        last = jax.lax.pmax(here, SEQ_AXIS)
        mine = (here == last) & takes

    def shared(own: Array, old: Array) -> Array:
        axes = (-1,) + (1,) * (own.ndim - 1)
        sent = jax.lax.psum(jnp.where(mine.reshape(axes), own, jnp.zeros((), own.dtype)), SEQ_AXIS)
        return sent if last is None else jnp.where((last >= 0).reshape(axes), sent, old)

    return jax.tree.map(shared, carry, otherwise)
