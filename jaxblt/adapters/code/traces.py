"""A read: a memory of sequences of a few tokens, as decayed sums of a short convolution's outputs."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.pools import Smooth
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import blank
from jaxblt.mixers.driver.history import ShortHistory
from pallas_kernels.short_conv import short_conv

TAPS = 3
"""Tokens that a trace reads at once, the fewest that `short_conv` takes."""
START = 3.0
"""Of the logit of a decay: a trace starts with a memory of about 20 tokens."""


@flax.struct.dataclass
class TraceState:
    """State of traces along a document.

    Attributes:
      past: products of the last tokens, a channel for each tap of each trace.
      sums: the traces, before their scale.
      chunk: the traces that the open chunk reads.
    """

    past: Float[Array, "B F S"]
    sums: Float[Array, "B H"]
    chunk: Float[Array, "B H"]


@dataclasses.dataclass(frozen=True)
class Traces(Read):
    """Decayed sums over the tokens so far, which know in which order tokens came.

        x_t = silu(b + sum_w h_{t - w} W_w),  s_t = a s_{t - 1} + x_t,  trace_t = sqrt(1 - a^2) s_t

    with w < `TAPS` and a = sigmoid(decay), one for each trace. There are `RouterConfig.hidden` of them. A hole adds
    nothing and is no time for s. A chunk reads the traces at its first token. Traces are zero at a hole, and for a
    chunk whose first token is one.
    """

    name: ClassVar[str] = "memory"

    def check(self, config: Any) -> None:
        """Raise ValueError for a router whose codes are known before their chunk."""
        super().check(config)
        if config.lag > 1:
            raise ValueError(
                f"Traces() reads up to a chunk's first token, and RouterConfig.lag = {config.lag} asks for a code that "
                "is known earlier: set lag=1, or read RecurrentMemory()"
            )

    def zero(self, config: Any, batch_size: int, dim: int) -> TraceState:
        """Return traces of nothing."""
        width, nothing = config.hidden, jnp.zeros((batch_size, config.hidden), jnp.float32)
        return TraceState(jnp.zeros((batch_size, TAPS * width, TAPS - 1), jnp.float32), nothing, nothing)

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the number of traces, 0 for a prefix."""
        return 0 if level == "prefix" else config.hidden

    def hear(self, router: nn.Module, call: RouterInput, state: TraceState | None) -> tuple[Features, Any]:
        """Return the traces at each token, and at the first token of its chunk."""
        past, sums, chunk = (None, None, None) if state is None else (state.past, state.sums, state.chunk)
        width, content = call.config.hidden, call.content
        taps = Linear(
            "btd,dwh->btwh", {"w": TAPS, "h": width}, ("embed", None, None), name="memory", parent=router
        )
        streams = (_channels(taps(call.normed)), None, None)
        shifted, past = call.rows.run(_shifts(width), streams, past, time_axis=2)
        bias = _of_traces(router, "memory_bias", 0.0, width)
        x = jnp.sum(shifted.swapaxes(1, 2).reshape(*call.time.shape, TAPS, width), 2)
        x = blank(jax.nn.silu(x + bias), content)
        logit = _of_traces(router, "memory_decay", START, width)
        keep = jnp.where(content[..., None], jax.nn.sigmoid(logit), 1.0)
        token, sums = call.rows.run(Smooth(), (keep, x), sums)
        token = token * jnp.sqrt(-jnp.expm1(2 * jax.nn.log_sigmoid(logit)))
        at_chunk, chunk = call.hold_from_chunk_start(token, chunk)
        after = None if state is None else TraceState(past, sums, chunk)  # pyright: ignore
        return {"chunk": at_chunk, "token": token}, after


def _of_traces(router: nn.Module, name: str, start: float, width: int) -> Float[Array, "1 1 H"]:
    """Return a parameter with a number for each trace."""
    init = named(nn.initializers.constant(start), None)
    return router.param(name, init, (width,), jnp.float32)[None, None]


def _channels(z: Float[Array, "B T W H"]) -> Float[Array, "B F T"]:
    return z.reshape(*z.shape[:2], -1).swapaxes(1, 2)


def _shifts(width: int) -> ShortHistory:
    """Return a core that delays the channels of tap w by w tokens."""
    taps = np.repeat(np.eye(TAPS, dtype=np.float32), width, 0)
    return ShortHistory(short_conv, jnp.asarray(taps), None, size=TAPS - 1)
