"""Traces: a router's memory of sequences of a few tokens, as decayed sums of a short convolution's outputs."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.pools import Smooth
from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import blank
from jaxblt.mixers.driver.history import ShortHistory
from jaxblt.mixers.driver.sequence import Rows
from pallas_kernels.short_conv import short_conv

TAPS = 3
"""Tokens that a trace reads at once, the fewest that `short_conv` takes."""
START = 3.0
"""Of the logit of a decay: a trace starts with a memory of about 20 tokens."""


@flax.struct.dataclass
class TraceState:
    """What traces carry of a document.

    Attributes:
      past: products of the last tokens, a channel for each tap of each trace.
      sums: the traces, before their scale.
      held: those that the open chunk reads.
    """

    past: Float[Array, "B F S"]
    sums: Float[Array, "B H"]
    held: Float[Array, "B H"]


def init_traces(width: int, batch_size: int) -> TraceState:
    """The state before the first token of rows."""
    nothing = jnp.zeros((batch_size, width), jnp.float32)
    return TraceState(jnp.zeros((batch_size, TAPS * width, TAPS - 1), jnp.float32), nothing, nothing)


def trace(
    router: nn.Module,
    config: Any,
    rows: Rows,
    h: Float[Array, "B T D"],
    time: Int[Array, "B T"],
    content: Bool[Array, "B T"],
    carry: TraceState | None,
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"], TraceState | None]:
    """Traces at each token, those at the first token of its chunk, and the state behind the call.

        x_t = silu(b + sum_w h_{t - w} W_w),  s_t = a s_{t - 1} + x_t,  trace_t = sqrt(1 - a^2) s_t

    with w < `TAPS` and a = sigmoid(decay), one for each trace. A hole adds nothing and is no time for s. Traces are
    zero at a hole, and for a chunk whose first token is one.

    Args:
      router: whose parameters these are.
      config: the `RouterConfig`.
      rows: of the call.
      h: the router's input behind its norm.
      time: of each token in its document.
      content: whether it is a token.
      carry: of the state.
    """
    width = config.hidden
    past = None if carry is None else carry.past
    z = Linear("btd,dwh->btwh", {"w": TAPS, "h": width}, ("embed", None, None), name="memory", parent=router)(
        h
    )
    shifted, left = rows.run(_shifts(width), (_channels(z), None, None), past, time_axis=2)
    bias = _of_traces(router, "memory_bias", 0.0, width)
    x = jnp.sum(shifted.swapaxes(1, 2).reshape(*time.shape, TAPS, width), 2)
    x = blank(jax.nn.silu(x + bias), content)
    logit = _of_traces(router, "memory_decay", START, width)
    keep = jnp.where(content[..., None], jax.nn.sigmoid(logit), 1.0)
    sums, after = rows.run(Smooth(), (keep, x), None if carry is None else carry.sums)
    traces = sums * jnp.sqrt(-jnp.expm1(2 * jax.nn.log_sigmoid(logit)))
    starts = (time % config.chunk == 0)[..., None]
    given = jnp.where(starts, 0.0, 1.0), jnp.where(starts, traces, 0.0)
    held, kept = rows.run(Smooth(), given, None if carry is None else carry.held)
    return traces, held, None if carry is None else TraceState(left, after, kept)  # pyright: ignore


def _of_traces(router: nn.Module, name: str, start: float, width: int) -> Float[Array, "1 1 H"]:
    """A parameter with a number for each trace."""
    init = named(nn.initializers.constant(start), None)
    return router.param(name, init, (width,), jnp.float32)[None, None]


def _channels(z: Float[Array, "B T W H"]) -> Float[Array, "B F T"]:
    return z.reshape(*z.shape[:2], -1).swapaxes(1, 2)


def _shifts(width: int) -> ShortHistory:
    """Delays the channels of tap w by w tokens."""
    taps = np.repeat(np.eye(TAPS, dtype=np.float32), width, 0)
    return ShortHistory(short_conv, jnp.asarray(taps), None, size=TAPS - 1)
