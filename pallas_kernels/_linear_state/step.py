"""One step of an op with a matrix of state per head, as in decoding: what its Hopper kernel takes, and its gradient.

Imports no GPU dialect.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import MOST_BLOCKS, why_not_streams
from pallas_kernels._own_gradient import OwnGradient

LANES = 128
"""Value channels of a program: one a thread of a warpgroup."""

KEYS = (8, 256)
"""Multiples of the first and up to the second may be a head's key channels: a copy takes no more rows of a state."""


def why_not(device: Device, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> str | None:
    """Why the kernel cannot run such a call, or None."""
    if (reason := why_not_streams(device, q, k, v)) is not None:
        return reason
    if (length := v.shape[1]) != 1:
        return f"it takes rows of 1 step, not {length}"
    if (keys := k.shape[3]) % KEYS[0] or keys > KEYS[1]:
        return f"its keys are a multiple of {KEYS[0]} wide, at most {KEYS[1]}, not {keys}"
    if v.shape[3] % LANES:
        return f"its values are a multiple of {LANES} wide, not {v.shape[3]}"
    if (heads := v.shape[0] * v.shape[2]) > MOST_BLOCKS:
        return (
            f"a grid has at most {MOST_BLOCKS} heads of rows, {v.shape[0]} rows of {v.shape[2]} have {heads}"
        )
    return None


@partial(OwnGradient, nondiff_argnums=(0, 1))
def derived_as(
    plain: Callable[..., Any], run: Callable[..., Any], arrays: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """run(**arrays), which is plain(**arrays), with the derivative of `plain`."""
    return run(**arrays)


def _forward(plain: Any, run: Any, arrays: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return run(**arrays), arrays


def _backward(plain: Any, run: Any, arrays: dict[str, Any], cotangents: Any) -> tuple[dict[str, Any]]:
    return jax.vjp(lambda arrays: plain(**arrays), arrays)[1](cotangents)


derived_as.defvjp(_forward, _backward)
