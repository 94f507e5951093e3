"""The streaming state of attention: a cache of keys and values of fixed capacity."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Clock, Tokens, last_run, start_clock

EMPTY = -1
"""Time of a slot that holds no token of the row's document."""


@flax.struct.dataclass
class AttentionState:
    """Keys and values of each row's document; the token of time t lies in slot t mod C.

    With a window of W the cache is a ring of W slots, which any document fits; without, C bounds the
    document.

    Attributes:
      clock: where each row stands.
      k: keys, position encoding applied.
      v: values.
      times: time of the token in each slot, `EMPTY` if none.
      capacity: the most tokens of a document; None with a window.
    """

    clock: Clock
    k: Float[Array, "B C G K"]
    v: Float[Array, "B C G K"]
    times: Int[Array, "B C"]
    capacity: int | None = flax.struct.field(pytree_node=False)


def init_attention_state(
    batch_size: int, *, num_kv_heads: int, head_dim: int, capacity: int, window: int | None, dtype: Any
) -> AttentionState:
    """An empty cache of min(window, capacity) slots."""
    slots = capacity if window is None else min(window, capacity)
    ring = window is not None and window <= capacity
    shape = (batch_size, slots, num_kv_heads, head_dim)
    return AttentionState(
        clock=start_clock(batch_size),
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        times=jnp.full((batch_size, slots), EMPTY, jnp.int32),
        capacity=None if ring else capacity,
    )


def write(
    state: AttentionState, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], tokens: Tokens
) -> AttentionState:
    """The cache after the call's tokens: those of the last document alone, and of them the last C.

    A new document empties the cache. Rows that were fed no token keep every bit. Holes take no slot of their
    own: what their slot held is as old as the capacity, hence out of the window.
    """
    slots = state.times.shape[1]
    end = last_run(tokens)
    last_time = jnp.max(jnp.where(tokens.run == end[:, None], tokens.time, EMPTY), axis=1)
    kept = tokens.content & (tokens.run == end[:, None]) & (tokens.time > last_time[:, None] - slots)
    slot = jnp.where(kept, tokens.time % slots, slots)
    times = jnp.where((end > 0)[:, None], EMPTY, state.times)

    def scatter(cache: Array, values: Array) -> Array:
        put = jax.vmap(lambda c, i, new: c.at[i].set(new, mode="drop"))
        return put(cache, slot, values.astype(cache.dtype))

    return dataclasses.replace(
        state, k=scatter(state.k, k), v=scatter(state.v, v), times=scatter(times, tokens.time)
    )
