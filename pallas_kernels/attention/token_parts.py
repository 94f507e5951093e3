"""How the slots of a cache are cut for one new token, and which of them it sees."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

EMPTY = -1
"""Time of a slot that holds nothing."""

STEP = 64
"""Slots that a program looks at at a time."""

MOST_PARTS = 8
"""Most parts, as the product behind attention reads them all."""

MOST_SLOTS = MOST_PARTS * 1024
"""Slots of the longest cache: a part of a longer one would keep one program busy for long."""

PROGRAMS = 132
"""Programs that a launch should have: as many as an H200 has multiprocessors."""

TURN = 2 * np.pi / 2.0**32
"""Radians of a unit of phase."""


def count_parts(heads: int, slots: int) -> int:
    """Return into how many parts what `heads` rows and key heads see is cut."""
    return max(1, min(MOST_PARTS, slots // STEP, -(-PROGRAMS // heads)))


def oldest(now: Array, window: int | None) -> Array:
    """Return the time behind which tokens are seen."""
    return jnp.full_like(now, EMPTY) if window is None else jnp.maximum(now - window, EMPTY)
