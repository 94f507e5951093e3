"""Calls with a state on a mesh that splits the sequence: which are split, and the state's side of those that are."""

from jaxblt.parallel.sequence import seq_axis

SHORTEST = 64
"""Tokens a device from which a call is split. All devices of the sequence do the whole of shorter ones."""


def splits_call(length: int) -> bool:
    """Whether a call of `length` tokens with a state is split along the sequence; the result is the same either way."""
    axis = seq_axis()
    return axis is not None and length >= SHORTEST * axis.size
