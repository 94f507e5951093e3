"""The way from a prompt to the state of `BLT.step`: its patches, the slots to feed, and each row's place afterwards.

A call starts at a block's edge in every row that has bytes, so no patch is open before it.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.mixers.driver.base import rows
from jaxblt.models.blt_state import BLTState
from jaxblt.models.bridge import Tail, take_ranks
from jaxblt.models.positions import Places, last_index, places
from jaxblt.parallel.sequence import seq_axis
from jaxblt.patching.patches import Patches, from_closed

TILE = 64
"""Bytes to whose multiples a call that is shorter than a block is filled up."""


def prompt_patches(state: BLTState, closed: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Patches:
    """Return the patches of a call.

    A call shorter than a block has a slot for a patch a byte, and one for the next. It is filled up to a multiple of
    `TILE` bytes only, instead of a block.
    """
    length = closed.shape[1]
    capacity = min(state.capacity, length + 1)
    # Leave a byte of padding: a block whose last byte has come has holes
    block_size = min(state.block_size, (length // TILE + 1) * TILE)
    return from_closed(closed, segment_ids, block_size=block_size, capacity=capacity)


def prompt_places(state: BLTState, patches: Patches) -> Places:
    """Return each byte's place.

    The call's first patch follows the one that the state remembers.
    """
    index = jnp.arange(patches.num_bytes, dtype=jnp.int32)[None]
    place = places(patches, state.position[:, None] + index, causal=True)
    slot = patches.patch_ids.reshape(len(place.offset), -1)[:, : patches.num_bytes]
    first = (slot == 0) & (index < patches.block_size)
    return dataclasses.replace(place, previous=jnp.where(first, state.previous[:, None], place.previous))


def fed_slots(patches: Patches) -> Int[Array, "B N P"]:
    """Return the latent stack's segment ids: 0 for an open patch and for what comes after it.

    Only a block whose last byte has come has holes.
    """
    full = patches.patch_ids[..., -1:] < patches.capacity
    ended = jnp.sum(patches.closed, -1, keepdims=True, dtype=jnp.int32)
    slot = jnp.arange(patches.capacity, dtype=jnp.int32)[None, None]
    return jnp.where(full | (slot < ended), patches.segment_ids, 0)


def earlier_patches(state: BLTState, document: Int[Array, "B"]) -> Tail:
    """Return the patches that closed before the call, for the documents that go on."""
    return state.recent, jnp.where(state.recent_valid, document[:, None], 0)


def after_prompt(
    state: BLTState,
    segment_ids: Int[Array, "B T"],
    patches: Patches,
    place: Places,
    keys: tuple[Float[Array, "B N L C"], Float[Array, "B N L C"]],
    z: Float[Array, "B N P D"],
) -> BLTState:
    """Return where each row stands after a call, except the states of embedding and stacks.

    Args:
      state: before the call, from `begin`.
      segment_ids: of the bytes, as `BLT.prefill` has them.
      patches, place: of the bytes.
      keys: keys and values of the bytes, for the patch that stays open.
      z: patch vectors.
    """
    size, document, last = state.block_size, segment_ids[:, 0], last_index(segment_ids)
    live = document != 0
    closed = patches.closed.reshape(len(last), -1)
    ended, offset = _at(closed, last), _at(place.offset, last) + 1
    left = jnp.where(ended, 0, offset)
    block, edge = last // size, (last + 1) % size == 0
    used = _at(jnp.sum(patches.closed, -1, dtype=jnp.int32), block)
    total = jnp.sum(closed, 1, dtype=jnp.int32)
    earlier = earlier_patches(state, document)
    recent, documents = take_ranks(z, patches, earlier, total[:, None], state.recent.shape[1])
    moved = {
        "position": _at(place.position, last) + 1,
        "last_segment": document,
        "keys": _open_patch(state.keys, keys[0], last, left),
        "values": _open_patch(state.values, keys[1], last, left),
        "offset": left,
        "previous": jnp.where(ended, offset, _at(place.previous, last)),
        "in_block": (last + 1) % size,
        "used": jnp.where(edge, 0, used),
        "recent": recent.astype(state.recent.dtype),
        "recent_valid": documents > 0,
    }
    select = lambda new, old: jnp.where(rows(live, new), new, old)  # noqa: E731
    return state.replace(**{name: select(new, getattr(state, name)) for name, new in moved.items()})


def _at(x: Shaped[Array, "B T"], index: Int[Array, "B"]) -> Shaped[Array, "B"]:
    return jnp.take_along_axis(x, index[:, None], 1)[:, 0]


def _open_patch(
    before: Float[Array, "B S C"], x: Float[Array, "B N L C"], last: Int[Array, "B"], count: Int[Array, "B"]
) -> Float[Array, "B S C"]:
    """Return the `count` bytes up to the last one, at their offsets in the open patch."""
    index = jnp.arange(before.shape[1], dtype=jnp.int32)[None]
    x = x.reshape(len(x), -1, x.shape[-1])
    start = (last + 1 - count)[:, None]
    found = jnp.take_along_axis(x, jnp.minimum(start + index, x.shape[1] - 1)[..., None], 1)
    return jnp.where((index < count[:, None])[..., None], found.astype(before.dtype), before)


def check_split(patches: Patches) -> None:
    """Raise ValueError unless every device of a `seq` axis has whole blocks, and equally many."""
    axis = seq_axis(patches)
    if axis is None or axis.whole(patches.num_bytes) % (axis.size * patches.block_size) == 0:
        return
    length, blocks = axis.whole(patches.num_bytes), axis.whole(patches.patch_ids.shape[1])
    raise ValueError(
        f"rows of {length} bytes, {blocks} blocks of {patches.block_size} bytes, do not "
        f"divide among the {axis.size} devices of mesh axis {axis.name!r}: use rows of a multiple of "
        f"{axis.size * patches.block_size} bytes"
    )
