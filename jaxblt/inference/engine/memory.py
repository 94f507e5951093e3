"""Lanes that get fewer rows where the device's memory is short."""

import warnings
from dataclasses import replace

import jax

from jaxblt.inference.engine.config import Lane

SHORT = "RESOURCE_EXHAUSTED"
"""The status with which XLA refuses memory."""


class LaneShrunkWarning(UserWarning):
    """A lane has fewer rows than were asked for."""


def shrink_lane(lane: Lane, error: Exception) -> Lane:
    """Return a lane of half the rows, and warn; raise an error that more memory would not help, or at one row."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or SHORT not in str(error) or lane.slots == 1:
        raise error
    fewer = replace(lane, slots=lane.slots // 2)
    warnings.warn(
        f"memory is short: a lane of {lane.slots} rows of {lane.capacity} bytes does not fit, it gets {fewer.slots}; "
        "ask for fewer rows, or for a smaller capacity",
        LaneShrunkWarning,
        stacklevel=2,
    )
    return fewer
