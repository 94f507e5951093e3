"""The state of a released BLT between two bytes: that of a BLT, and the maximum over the open patch."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.layers import stream_dtype
from jaxblt.models.blt_state import BLTState, PatchedConfig, init_blt_state
from jaxblt.models.blt_stream import Cut
from jaxblt.models.released_blt.bridge import find_peaks
from jaxblt.models.stack import StackState
from jaxblt.patching import PatcherConfig


class ReleasedState(BLTState):
    """Streaming state; every row advances on its own.

    `keys` and `values` have room for the longest patch that can be, and `recent` holds the latest patch.

    Attributes:
      peak: the maximum over the bytes of the open patch.
    """

    peak: Float[Array, "B C"]


def init_released_state(
    config: PatchedConfig, patcher: PatcherConfig, batch_size: int, *, num_bytes: int, dtype: Any
) -> ReleasedState:
    """Return the state before the first byte; arguments are those of `init_blt_state`.

    Raises:
      ValueError: the patcher sees the future.
    """
    # Give no room to blocks that are longer than a document: slots of the latent stack would fill the memory
    size = min(patcher.block_size, num_bytes)
    fitted = dataclasses.replace(
        patcher, block_size=size, capacity=min(patcher.slots, size), min_length=1, max_length=None
    )
    state = init_blt_state(config, fitted, batch_size, num_bytes=num_bytes, dtype=dtype)
    mixer: Any = config.encoder.mixer(config.encoder.pattern[0])
    # Hold a block where slots may run out: bytes then join the open patch, beyond its longest length
    is_bounded = patcher.slots >= dataclasses.replace(patcher, capacity=None).slots
    longest = patcher.longest if is_bounded else patcher.block_size
    room = (batch_size, min(longest, num_bytes), mixer.groups * mixer.width)
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    fields |= {"keys": jnp.zeros(room, dtype), "values": jnp.zeros(room, dtype)}
    fields |= {"read_keys": None, "read_values": None}
    fields |= {"block_size": patcher.block_size, "capacity": patcher.slots}
    peak = jnp.zeros((batch_size, config.encoder.dim), stream_dtype(dtype))
    return ReleasedState(**fields, peak=peak)


def open_peak(state: ReleasedState, cut: Cut, h: Float[Array, "B T C"], slots: int) -> Float[Array, "B N C"]:
    """Return the maximum over the bytes of each of the call's patches, that of the state being number 0.

    Args:
      state: before the call, from `begin`.
      cut: the patches of the call's bytes.
      h: the bytes.
      slots: patches to return; one that the call leaves open counts.
    """
    # Put the state's in front as number 0 in any case: numbers must not fall
    earlier = jnp.where(state.offset[:, None] > 0, state.peak.astype(h.dtype), -jnp.inf)
    numbers = jnp.pad(jnp.where(cut.live, cut.number, slots), ((0, 0), (1, 0)))
    joined = jnp.concatenate([earlier[:, None], h], 1)
    return find_peaks(joined[:, None], numbers[:, None], slots)[:, 0]


def decoder_states(state: StackState, parts: int) -> list[StackState]:
    """Cut the state of an unrolled decoder as its blocks are."""
    size = len(state.periods) // parts
    return [
        dataclasses.replace(state, periods=state.periods[i * size : (i + 1) * size], rest=())
        for i in range(parts)
    ]
