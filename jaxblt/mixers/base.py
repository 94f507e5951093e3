"""What every sequence mixer has in common: the contract, and the bookkeeping of segments and state.

A mixer is a Linen module `(x, *, segment_ids, positions, state) -> (y, state)` built from a frozen config. Segment
ids say what a position is: s > 0 is a token of document s; -s is a hole inside document s, a slot that counts as time
and holds nothing; 0 is no token at all and changes no bit of the state.
"""

from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

State = Any


@runtime_checkable
class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer. `dim` is the width D of its input and output."""

    @property
    def dim(self) -> int: ...

    @property
    def causal(self) -> bool: ...

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
        """The module; parameters are fp32, computation in `dtype`."""
        ...

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> State:
        """The state before the first token, for documents of at most `capacity` tokens."""
        ...


def init_state(config: MixerConfig, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> State:
    """The state of `config`'s mixer before the first token, for `batch_size` rows.

    Args:
      config: the mixer's frozen config.
      batch_size: rows; each advances on its own.
      capacity: the most tokens a document may hold where the mixer keeps its past (attention, implicit filters).
      dtype: of what is cached; accumulators are fp32 whatever it is.
    """
    if not config.causal:
        raise ValueError("a bidirectional mixer has no state: set causal=True to decode or stream")
    return config.init_state(batch_size, capacity=capacity, dtype=dtype)


@flax.struct.dataclass
class Clock:
    """Where each row stands: the part of the state that every mixer has.

    Attributes:
      position: tokens (holes included) of the current document so far.
      last_segment: |segment id| of the last token; 0 before the first.
    """

    position: Int[Array, "B"]
    last_segment: Int[Array, "B"]


def start_clock(batch_size: int) -> Clock:
    zero = jnp.zeros((batch_size,), jnp.int32)
    return Clock(position=zero, last_segment=zero)


@flax.struct.dataclass
class Tokens:
    """The tokens of one call, those that are no token moved behind the others.

    Attributes:
      x: inputs, in the order of `order`; holes and non-tokens are zero.
      order: where each came from.
      live: True for tokens and holes.
      content: True for tokens alone.
      run: 0 for tokens that continue the state's document, then 1, 2, ... at each change; -1 for non-tokens.
      positions: offset in the document.
    """

    x: Float[Array, "B T D"]
    order: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    content: Bool[Array, "B T"]
    run: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def arrange(
    x: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
    clock: Clock,
) -> tuple[Tokens, Clock]:
    """Sorts a call's tokens to the front of each row and numbers them after the state's `clock`.

    With this, a mixer's streaming path need only know a contiguous run of tokens with a tail of nothing.
    """
    if segment_ids is None:
        segment_ids = jnp.maximum(clock.last_segment, 1)[:, None] * jnp.ones(x.shape[:2], jnp.int32)
    order = jnp.argsort(segment_ids == 0, axis=1, stable=True).astype(jnp.int32)
    segments = jnp.take_along_axis(segment_ids, order, 1)
    document, live = jnp.abs(segments), segments != 0
    before = jnp.concatenate([clock.last_segment[:, None], document[:, :-1]], 1)
    run = jnp.where(live, jnp.cumsum(document != before, axis=1, dtype=jnp.int32), -1)
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    first = jnp.where(document != before, index, -1)
    first = jnp.maximum.accumulate(first, axis=1)
    counted = jnp.where(run == 0, clock.position[:, None] + index, index - first)
    if positions is None:
        ordered_positions = counted
    else:
        ordered_positions = jnp.take_along_axis(positions, order, 1)
    count = jnp.sum(live, 1, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]
    any_live = count > 0
    end_position = jnp.take_along_axis(ordered_positions, last, 1)[:, 0] + 1
    end_segment = jnp.take_along_axis(document, last, 1)[:, 0]
    moved = Clock(
        position=jnp.where(any_live, end_position, clock.position),
        last_segment=jnp.where(any_live, end_segment, clock.last_segment),
    )
    content = segments > 0
    x = jnp.take_along_axis(x, order[..., None], 1) * content[..., None].astype(x.dtype)
    tokens = Tokens(x=x, order=order, live=live, content=content, run=run, positions=ordered_positions)
    return tokens, moved


def restore(y: Float[Array, "B T D"], tokens: Tokens) -> Float[Array, "B T D"]:
    """Outputs back in the order of the call; holes and non-tokens are zero."""
    y = y * tokens.content[..., None].astype(y.dtype)
    back = jnp.argsort(tokens.order, axis=1).astype(jnp.int32)
    return jnp.take_along_axis(y, back[..., None], 1)


def last_run(tokens: Tokens) -> Int[Array, "B"]:
    """The run that each row ends in: 0 if the call held no new document."""
    return jnp.maximum(jnp.max(tokens.run, axis=1), 0)
