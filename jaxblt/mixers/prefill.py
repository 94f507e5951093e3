"""Calls with a state whose tokens are split along the sequence: the state enters the first device, leaves the last."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxblt.mixers.base import Clock
from jaxblt.parallel.sequence import seq_axis


def splits_call(length: int, segment_ids: Int[Array, "B T"] | None, *, carries: bool = True) -> bool:
    """Whether the tokens of a call with a state are split; a single one never is.

    Args:
      length: tokens of the call.
      segment_ids: the call's documents.
      carries: the mixer hands its state from device to device.

    Raises:
      ValueError: the mesh splits the sequence, but the mixer's state or the call's segment ids do not let it.
    """
    axis = seq_axis()
    if axis is None or length == 1:
        return False
    if carries and segment_ids is None:
        return True
    reason = "segment ids reorder tokens" if carries else "a finite filter's past inputs are not split"
    raise ValueError(
        f"{length} tokens with a state on a mesh that splits the sequence over {axis.size} devices: {reason}. "
        "Prefill one document a row without segment ids through mixers of constant state (ModalFilter, the gated "
        "recurrence), stream on a mesh with seq=1, or feed one token a call"
    )


def advanced(clock: Clock, length: int, positions: Int[Array, "B T"] | None) -> Clock:
    """The clock after `length` tokens that continue each row's document."""
    return Clock(
        time=clock.time + length,
        position=clock.position + length if positions is None else positions[:, -1] + 1,
        last_segment=jnp.maximum(clock.last_segment, 1),
    )
