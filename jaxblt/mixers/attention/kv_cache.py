"""The streaming state of attention: a cache of keys and values of fixed capacity."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.base import Clock, Tokens, last_run, start_clock
from jaxblt.parallel.attention.plan import CacheShape
from jaxblt.parallel.sequence import made_split, seq_axis
from jaxblt.show import show

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
      capacity: the most tokens of a document; None with a window. A cache so bounded lies in equal runs of slots on the
        devices of a mesh axis `seq`. A ring is whole on all of them.
    """

    clock: Clock
    k: Float[Array, "B C G K"]
    v: Float[Array, "B C G K"]
    times: Int[Array, "B C"]
    capacity: int | None = flax.struct.field(pytree_node=False)

    __repr__ = show

    @property
    def shape(self) -> CacheShape:
        """Its size and dtype, of which calls are planned."""
        return CacheShape(self.times.shape[1], bounded=self.capacity is not None, dtype=self.k.dtype)


def init_attention_state(
    batch_size: int, *, num_kv_heads: int, head_dim: int, capacity: int, window: int | None, dtype: Any
) -> AttentionState:
    """Return an empty cache: the ring of a window, or `capacity` slots in equal runs on the devices of a `seq` axis."""
    ring, axis = window is not None and window <= capacity, seq_axis()
    # Keep the number of slots even: the op pads odd ones for cuDNN, which would copy the cache at every token.
    unit = 2 if axis is None else axis.size
    slots = window if ring else -(-capacity // unit) * unit
    shape = (batch_size, slots, num_kv_heads, head_dim)

    def empty() -> Cache:
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full(shape[:2], EMPTY, jnp.int32))

    cache = empty() if ring else made_split(empty)
    return AttentionState(
        clock=start_clock(batch_size), **cache._asdict(), capacity=None if ring else capacity
    )


def check_ring(state: AttentionState | None, window: int | None) -> None:
    """Raise ValueError for a cache that was made for another window.

    A ring may have forgotten what `window` still sees. Kernels read whole documents of a bounded cache, whatever the
    window.
    """
    if state is None:
        return
    slots, most = state.times.shape[1], state.capacity
    held = None
    if most is None and slots != window:
        held = f"the ring of a window of {slots} tokens"
    elif most is not None and window is not None and window < most:
        held = f"a cache of documents of {most} tokens"
    if held is not None:
        raise ValueError(
            f"the state is {held}, and the config has window = {window}: make it by init_state of the same config"
        )


class Cache(NamedTuple):
    """The arrays of an `AttentionState`, or the slots of them that a device holds."""

    k: Float[Array, "B C G K"]
    v: Float[Array, "B C G K"]
    times: Int[Array, "B C"]


class Entries(NamedTuple):
    """Entries that a call's tokens bring to the cache.

    Attributes:
      k, v, times: as in the cache.
      ids: 1 for tokens of the document that the cache holds, then 2, 3, ...; 0 for holes and non-tokens.
      slot: where each goes; C if it is not kept.
    """

    k: Float[Array, "B T G K"]
    v: Float[Array, "B T G K"]
    times: Int[Array, "B T"]
    ids: Int[Array, "B T"]
    slot: Int[Array, "B T"]


class Meeting(NamedTuple):
    """A cache and the tokens that meet it.

    Attributes:
      cache: before the call.
      new: what the tokens bring to it.
      fresh: rows whose cache a new document empties.
      time: tokens of each row's document before the call.
    """

    cache: Cache
    new: Entries
    fresh: Bool[Array, "B"]
    time: Int[Array, "B"]


def meet(
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    tokens: Tokens,
    state: AttentionState,
    *,
    split: bool,
) -> Meeting:
    """Return the state's cache and what a call's keys and values bring to it.

    `split` says that a mesh splits the tokens along the sequence.

    Raises:
      ValueError: the cache does not divide among the devices, or split tokens do not fit it.
    """
    if state.capacity is not None:
        _check_slots(state.times.shape[1])
    if split:
        _check_fits(tokens, state)
    new, fresh = entries(k, v, tokens, state.times.shape[1])
    return Meeting(Cache(state.k, state.v, state.times), new, fresh, state.clock.time)


def _check_slots(slots: int) -> None:
    """Raise ValueError, naming the slots and the fix, unless they divide among the devices of a `seq` axis."""
    axis = seq_axis()
    if axis is not None and slots % axis.size:
        raise ValueError(
            f"a cache of {slots} slots does not divide among the {axis.size} devices of mesh axis {axis.name!r}: "
            f"call init_state where the mesh is in force, or with capacity={-(-slots // axis.size) * axis.size}"
        )


def _check_fits(tokens: Tokens, state: AttentionState) -> None:
    """Raise ValueError for a prompt that is longer than the cache."""
    length = tokens.run.shape[1]
    if tokens.whole and state.capacity is not None and length > state.capacity:
        raise ValueError(
            f"a prompt of {length} tokens does not fit a cache of {state.capacity}: call "
            f"init_state(capacity={length}) or more"
        )


def entries(
    k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], tokens: Tokens, slots: int
) -> tuple[Entries, Bool[Array, "B"]]:
    """Return a call's tokens for a cache of C = `slots`, and the rows whose cache a new document empties.

    Kept are those of the last document alone, and of them the last C. Holes take no slot of their own: what their slot
    held is as old as the capacity, hence out of the window.
    """
    end = last_run(tokens)
    last_time = jnp.max(jnp.where(tokens.run == end[:, None], tokens.time, EMPTY), axis=1)
    kept = tokens.content & (tokens.run == end[:, None]) & (tokens.time > last_time[:, None] - slots)
    slot = jnp.where(kept, tokens.time % slots, slots)
    return Entries(k, v, tokens.time, jnp.where(tokens.content, tokens.run + 1, 0), slot), end > 0


def emptied(cache: Cache, rows: Bool[Array, "B"]) -> Cache:
    """Return the cache without what these rows held."""
    return cache._replace(times=jnp.where(rows[:, None], EMPTY, cache.times))


def put(cache: Cache, new: Entries, first: int | Int[Array, ""] = 0) -> Cache:
    """Return the cache, whose slots count from `first`, with its entries; all else keeps every bit."""
    slots = cache.times.shape[1]
    here = (new.slot >= first) & (new.slot < first + slots)
    slot = jnp.where(here, new.slot - first, slots)

    def scatter(old: Array, values: Array) -> Array:
        place = jax.vmap(lambda c, i, x: c.at[i].set(x, mode="drop"))
        return place(old, slot, values.astype(old.dtype))

    return Cache(scatter(cache.k, new.k), scatter(cache.v, new.v), scatter(cache.times, new.times))
