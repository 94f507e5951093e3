"""Past inputs of a convolution in a call that a mesh splits along the sequence: what they add, and the next ones."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.base import Tokens, last_run
from jaxblt.mixers.conv_state import op_segments
from jaxblt.parallel.sequence import SEQ_AXIS, over_sequence


def after_history(
    conv: Callable[[Float[Array, "B D N"], Any], Float[Array, "B D N"]],
    y: Float[Array, "B D T"],
    u: Float[Array, "B D T"],
    tokens: Tokens,
    history: Float[Array, "B D S"],
    filter: Any,
) -> tuple[Float[Array, "B D T"], Float[Array, "B D S"]]:
    """Outputs with the state's inputs in front, and the last S inputs of each row's last document.

    A convolution is linear: that of the old inputs reaches S steps into the call and is added to that of the new ones.

    Args:
      conv: (inputs, filter) -> outputs, without gates and skip connection, of rows that one device has whole.
      y: outputs as if the call started every document.
      u: its inputs, zero at holes and non-tokens.
      tokens: of the call.
      history: the state's inputs, whole on every device.
      filter: of `conv`.
    """
    size = history.shape[-1]
    if not size:
        return y, history
    ids = op_segments(tokens)
    streams = (y, u, None if ids is None else ids[:, None])

    def island(streams: Any, rows: Any, filter: Any) -> tuple[Array, Array]:
        (y, u, ids), (history, place, same) = streams, rows
        added = _reached(
            conv(jnp.pad(history.astype(u.dtype), ((0, 0), (0, 0), (0, size))), filter), y.shape[-1]
        )
        seen = True if ids is None else ids == 1
        return y + jnp.where(seen, added, jnp.zeros((), added.dtype)), _latest(history, u, place, same)

    rows = (history, *_places(tokens, size))
    return over_sequence(island, streams, rows, filter, time_axis=2, outputs=(True, False))


def _reached(outputs: Float[Array, "B D N"], length: int) -> Float[Array, "B D T"]:
    """What the old inputs add to this device's `length` steps, from the outputs at them and at the S steps after."""
    size = outputs.shape[-1] // 2
    padded = jnp.pad(outputs[..., size:], ((0, 0), (0, 0), (0, length)))
    start = jnp.minimum(lax.axis_index(SEQ_AXIS) * length, size)
    return lax.dynamic_slice_in_dim(padded, start, length, 2)


def _places(tokens: Tokens, size: int) -> tuple[Int[Array, "B S"], Bool[Array, "B S"]]:
    """Where in the call the next state's inputs stand (before it, if negative), and which are of the last document."""
    count, end = jnp.sum(tokens.live, 1, dtype=jnp.int32), last_run(tokens)[:, None]
    place = count[:, None] + jnp.arange(-size, 0, dtype=jnp.int32)[None]
    run = jnp.take_along_axis(tokens.run, jnp.maximum(place, 0), 1)
    return place, jnp.where(place < 0, 0, run) == end


def _latest(
    history: Float[Array, "B D S"],
    u: Float[Array, "B D T"],
    place: Int[Array, "B S"],
    same: Bool[Array, "B S"],
) -> Float[Array, "B D S"]:
    """The inputs at `place`, each sent by the device that has it."""
    length = u.shape[-1]
    here = place - lax.axis_index(SEQ_AXIS) * length
    mine = (here >= 0) & (here < length)
    own = jnp.take_along_axis(u, jnp.clip(here, 0, length - 1)[:, None], 2).astype(history.dtype)
    new = lax.psum(jnp.where(mine[:, None], own, jnp.zeros((), own.dtype)), SEQ_AXIS)
    old = jnp.take_along_axis(
        history, jnp.clip(place + history.shape[-1], 0, history.shape[-1] - 1)[:, None], 2
    )
    return jnp.where(same[:, None], jnp.where((place < 0)[:, None], old, new), jnp.zeros((), history.dtype))
