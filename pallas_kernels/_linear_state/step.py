"""One step of an op with a matrix of state per head, as in decoding: what its Hopper kernel takes, and its gradient.

Imports no GPU dialect.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import MOST_BLOCKS, why_not_streams
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels._own_gradient import OwnGradient

LANES = 128
"""Value channels of a program: one a thread of a warpgroup."""

KEYS = (8, 256)
"""Multiples of the first and up to the second may be a head's key channels: a copy takes no more rows of a state."""


def why_not(device: Device, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
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


def run_step(
    plain: Callable[..., Any],
    run: Callable[..., Any],
    streams: dict[str, Array],
    log_gate: Float[Array, "B 1 ..."] | None,
    state: Float[Array, "B H K V"] | None,
    segment_ids: Int[Array, "B 1"] | None,
    *,
    output_final_state: bool,
) -> Float[Array, "B 1 H V"] | tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """Return the output of one step, and the state behind it if asked for.

    A document begins behind a row's first token only, so no state of one step is of another document.

    Args:
      plain: what the derivative is taken of; it has the arguments and the results of `run`.
      run: the step, of the streams, log_gate and state by name.
      streams: q, k, v and beta if there is one.
      log_gate: of any kind; None keeps the state.
      state: zero if None.
      segment_ids: documents; None if all positions are tokens.
      output_final_state: return the state too.
    """
    k, v = streams["k"], streams["v"]
    gate = jnp.zeros(v.shape[:3], jnp.float32) if log_gate is None else log_gate
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    arrays = vary_alike(*(only_tokens(x, segment_ids) for x in (*streams.values(), gate)), state)
    names = (*streams, "log_gate", "state")
    found: Any = derived_as(plain, run, dict(zip(names, arrays, strict=True)))
    o = only_tokens(found[0], segment_ids)
    return (o, found[1]) if output_final_state else o


@partial(OwnGradient, nondiff_argnums=(0, 1))
def derived_as(
    plain: Callable[..., Any], run: Callable[..., Any], arrays: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Return run(**arrays), which is plain(**arrays), with the derivative of `plain`."""
    return run(**arrays)


def _forward(plain: Any, run: Any, arrays: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return run(**arrays), arrays


def _backward(plain: Any, run: Any, arrays: dict[str, Any], cotangents: Any) -> tuple[dict[str, Any]]:
    return jax.vjp(lambda arrays: plain(**arrays), arrays)[1](cotangents)


derived_as.defvjp(_forward, _backward)
