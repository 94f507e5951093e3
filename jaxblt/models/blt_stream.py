"""The next few bytes of each row in one pass, from any byte of a block: where patches close, and what stays open.

open patch of the state  a b c      call  d e f g h i      closed  . 1 . . 1 .
patches                  a b c d e | f g h                 left open  i
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.models.blt_state import BLTState, patch_axis
from jaxblt.models.positions import Places

CUT, CLOSED = "cut", "closed"
"""The collection and the name under which `BLT.stream` sows which bytes ended a patch, for callers that ask for it."""


class Cut(NamedTuple):
    """The patches of a call's bytes. The open patch of the state is number 0.

    Attributes:
      live: True for bytes; they stand before all else.
      closed: True where a patch ends.
      number: of each byte's patch.
      offset: of each byte in its patch.
      previous: length of the patch before it, 0 for none.
    """

    live: Bool[Array, "B T"]
    closed: Bool[Array, "B T"]
    number: Int[Array, "B T"]
    offset: Int[Array, "B T"]
    previous: Int[Array, "B T"]

    @property
    def num_bytes(self) -> Int[Array, "B"]:
        """Bytes of the call."""
        return jnp.sum(self.live, 1, dtype=jnp.int32)

    @property
    def total(self) -> Int[Array, "B"]:
        """Patches that close."""
        return jnp.sum(self.closed, 1, dtype=jnp.int32)

    @property
    def ends(self) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
        """The last byte of each patch that closes, and which of the T places hold one."""
        order = jnp.argsort(~self.closed, axis=1, stable=True).astype(jnp.int32)
        place = jnp.arange(order.shape[1], dtype=jnp.int32)[None]
        return order, place < self.total[:, None]

    @property
    def visible(self) -> Int[Array, "B T"]:
        """The patches of the call that each byte may see."""
        return self.number + self.closed.astype(jnp.int32)

    def places(self, state: BLTState) -> Places:
        """Return each byte's place."""
        index = jnp.arange(self.live.shape[1], dtype=jnp.int32)[None]
        return Places(self.offset, self.previous, state.position[:, None] + index)


def cut_bytes(state: BLTState, closed: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Cut:
    """Return the patches of a call's bytes, given where they close; `state` is of `begin`."""
    live = segment_ids != 0
    closed = closed & live
    index = jnp.arange(live.shape[1], dtype=jnp.int32)[None]
    latest = jax.lax.cummax(jnp.where(closed, index, -1), axis=1)
    before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    offset = jnp.where(before < 0, state.offset[:, None] + index, index - before - 1)
    length = jnp.take_along_axis(offset + 1, jnp.maximum(before, 0), 1)
    previous = jnp.where(before < 0, state.previous[:, None], length)
    closings = jnp.cumsum(closed, 1, dtype=jnp.int32)
    return Cut(live, closed, closings - closed.astype(jnp.int32), offset, previous)


def lay_bytes(
    state: BLTState, cut: Cut, keys: tuple[Float[Array, "B T C"], Float[Array, "B T C"]]
) -> tuple[tuple[Float[Array, "B 1 N C"], Float[Array, "B 1 N C"]], Int[Array, "B 1 N"]]:
    """Return keys and values of the open patch and the call's bytes behind it, and the patch of each.

    T stands for no patch.
    """
    length, size = cut.live.shape[1], state.keys.shape[1]
    put = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, 0))

    def behind(old: Float[Array, "B S C"], new: Float[Array, "B T C"]) -> Float[Array, "B 1 N C"]:
        room = jnp.pad(old, ((0, 0), (0, length), (0, 0)))
        return put(room, new.astype(old.dtype), state.offset)[:, None]

    index = jnp.arange(size + length, dtype=jnp.int32)[None]
    own = jnp.where(cut.live, cut.number, length)
    numbers = put(jnp.full((len(own), size + length), length, jnp.int32), own, state.offset)
    numbers = jnp.where(index < state.offset[:, None], 0, numbers)
    return (behind(state.keys, keys[0]), behind(state.values, keys[1])), numbers[:, None]


def after_bytes(
    state: BLTState,
    segment_ids: Int[Array, "B T"],
    cut: Cut,
    keys: tuple[Float[Array, "B T C"], Float[Array, "B T C"]],
    seen: dict[str, Array],
) -> tuple[BLTState, Int[Array, "B"]]:
    """Return where each row stands behind a call, and how many slots of a block that it completes stay unused.

    Args:
      state: before the call, from `begin`.
      segment_ids: of the bytes.
      cut: their patches.
      keys: keys and values of the bytes.
      seen: patches by the names of `BLTState.seen`, the W of the state first.
    """
    count, total, rows = cut.num_bytes, cut.total, jnp.arange(len(segment_ids), dtype=jnp.int32)
    ended, last = total > 0, jnp.maximum(count - 1, 0)
    closing = jnp.take_along_axis(cut.ends[0], jnp.maximum(total - 1, 0)[:, None], 1)[:, 0]
    opened = cut.live & (cut.number == total[:, None])
    slot = jnp.where(opened, cut.offset, state.block_size)
    k, v = (x.astype(state.keys.dtype) for x in keys)
    used, edge = state.used + total, (count > 0) & (state.in_block + count == state.block_size)
    latest = total[:, None] + jnp.arange(state.recent.shape[1], dtype=jnp.int32)[None]

    def last_of(name: str, array: Array) -> Array:
        """Take the W latest patches."""
        axis = patch_axis(name)
        index = jnp.expand_dims(latest, [i for i in range(1, array.ndim) if i != axis])
        return jnp.take_along_axis(array, index, axis).astype(getattr(state, name).dtype)

    after = state.replace(
        position=state.position + count,
        last_segment=jnp.where(count > 0, segment_ids[rows, last], state.last_segment),
        keys=state.keys.at[rows[:, None], slot].set(k, mode="drop"),
        values=state.values.at[rows[:, None], slot].set(v, mode="drop"),
        offset=jnp.where(ended, count - closing - 1, state.offset + count),
        previous=jnp.where(ended, cut.offset[rows, closing] + 1, state.previous),
        in_block=jnp.where(edge, 0, state.in_block + count),
        used=jnp.where(edge, 0, used),
        **{name: last_of(name, array) for name, array in seen.items()},
    )
    return after, jnp.where(edge, state.capacity - used, 0)
