"""A long causal convolution token by token: blocks of inputs, of doubling sizes, convolved for the outputs to come.

Time is cut into turns of Q tokens, and a turn into halves, quarters and so on down to blocks of `NEAR` tokens:

  - A turn begins with what all inputs before it add to its Q outputs, one transform.
  - Where the first half of a block of 2s tokens ends, its s inputs are convolved for the s outputs of the second half.
  - Inputs of the last, open block of `NEAR` tokens are multiplied by their taps at each token.

Two steps of a turn lie in the two halves of exactly one block, or in one block of `NEAR`. So each pair counts once,
and the sums are those of the whole convolution. A token costs O(log^2 Q) a channel in the mean.

Source: relaxed multiplication (van der Hoeven 2002); Flash Inference (Oncescu et al. 2024, arXiv:2410.12982, sec. 3).
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.base import rows, select_rows
from jaxblt.mixers.driver.marks import mark
from jaxblt.show import show
from pallas_kernels.long_conv import long_conv_history

NEAR = 256
"""Inputs at most that a token multiplies by their taps one by one."""


@flax.struct.dataclass
class DoublingState:
    """Inputs that were, and outputs that come.

    Attributes:
      past: the last R inputs of the row's document, zero before its start, as a ring: the oldest at `place`.
      coming: what inputs so far add to the Q outputs of the turn. Means nothing until a turn begins.
      place: where the next input is written, 0 <= place < R. R is a multiple of Q, so a turn begins at multiples of Q.
    """

    past: Float[Array, "B D R"]
    coming: Float[Array, "B D Q"]
    place: Int[Array, "B"]

    __repr__ = show

    @property
    def turn(self) -> int:
        """Q."""
        return self.coming.shape[-1]

    def ordered(self) -> Float[Array, "B D R"]:
        """Return the past, oldest first."""
        return jax.vmap(lambda past, place: jnp.roll(past, -place, axis=-1))(self.past, self.place)

    def behind(self, past: Float[Array, "B D R"], takes: Bool[Array, "B"] | None) -> "DoublingState":
        """Return the state of rows in which a call of many tokens left `past`, oldest first.

        A turn begins.
        """
        after = dataclasses.replace(self, past=past, place=jnp.zeros_like(self.place))
        return after if takes is None else select_rows(takes, after, self)


def init_doubling(rows: int, channels: int, size: int, dtype: Any) -> DoublingState:
    """Return the state before the first token, for filters that reach `size` steps back.

    A turn is the largest power of two up to half as many. The past is of whole turns.
    """
    turn = 1 << max((size + 1) // 2, 1).bit_length() - 1
    kept = max(-(-size // turn), 1) * turn
    past = jnp.zeros((rows, channels, kept), dtype)
    coming = jnp.zeros((rows, channels, turn), jnp.float32)
    return DoublingState(past, coming, jnp.zeros((rows,), jnp.int32))


@flax.struct.dataclass
class Doubling:
    """y = h * u + b u, one token a call.

    Attributes:
      taps: lag 0 first; as many as the past reaches back, or all.
      bias: of the skip connection, or None.
    """

    taps: Float[Array, "D F"]
    bias: Float[Array, "D"] | None

    def next(
        self, u: Float[Array, "B D 1"], segment_ids: Int[Array, "B 1"] | None, state: DoublingState
    ) -> tuple[Float[Array, "B D 1"], DoublingState]:
        """Return outputs at each row's next token or hole, and the state.

        Rows with neither keep their state.

        Args:
          u: inputs.
          segment_ids: 1 for a token of the state's document, 2 for the first of another; negative for holes, 0 for
            nothing. None for tokens of the state's document.
          state: before it.
        """
        marks = mark(segment_ids, 1)
        takes = jnp.ones(u.shape[:1], bool) if marks.takes is None else marks.takes
        begins = jnp.zeros_like(takes) if marks.begins is None else marks.begins
        state = dataclasses.replace(state, place=jnp.where(begins, 0, state.place))
        due = takes & (state.place % min(NEAR, state.turn) == 0)
        # Keep the condition: without it every call would compute all blocks.
        state = jax.lax.cond(jnp.any(due), self._joined, lambda due, begins, state: state, due, begins, state)
        u = marks.inputs(jnp.moveaxis(u, 2, 1))[:, 0]
        written = jnp.where(
            rows(takes, u), u.astype(state.past.dtype), _at(state.past, state.place, 1)[..., 0]
        )
        state = dataclasses.replace(state, past=_put(state.past, written[..., None], state.place))
        y = _at(state.coming, state.place % state.turn, 1)[..., 0] + self.near(state)
        if self.bias is not None:
            y = y + self.bias[None] * u.astype(jnp.float32)
        y = jnp.moveaxis(marks.inputs(y[:, None]), 1, 2).astype(u.dtype)
        place = jnp.where(takes, (state.place + 1) % state.past.shape[-1], state.place)
        return y, dataclasses.replace(state, place=place)

    def near(self, state: DoublingState) -> Float[Array, "B D"]:
        """Return what the open block of inputs adds to the output at the last of them."""
        size = min(NEAR, state.turn)
        last = state.place % size
        block = _at(state.past, state.place - last, size).astype(jnp.float32)
        near = jnp.flip(self.taps[:, :size], -1).astype(jnp.float32)
        # Pad with zeros behind lag 0: they meet what the ring holds behind the last input.
        near = jnp.pad(near, ((0, 0), (0, size - 1)))
        taps = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(near, start, size, axis=-1))(
            size - 1 - last
        )
        return jnp.einsum("bdc,bdc->bd", block, taps, precision=jax.lax.Precision.HIGHEST)

    def _joined(self, due: Bool[Array, "B"], begins: Bool[Array, "B"], state: DoublingState) -> DoublingState:
        """Join the blocks that end before the next token, in the rows that are due."""
        state = dataclasses.replace(state, past=jnp.where(rows(begins, state.past), 0, state.past))
        at = state.place % state.turn
        state = _where_any(due & (at == 0), self.begin_turn, state)
        size = NEAR
        while size < state.turn:
            ends = due & (at % (2 * size) == size)
            state = _where_any(ends, lambda ends, state, size=size: self.join(size, ends, state), state)
            size *= 2
        return state

    def begin_turn(self, rows_due: Bool[Array, "B"], state: DoublingState) -> DoublingState:
        """Compute the outputs of a turn from the whole past."""
        added = long_conv_history(state.ordered(), self.taps, steps=state.turn).astype(jnp.float32)
        return dataclasses.replace(state, coming=jnp.where(rows(rows_due, added), added, state.coming))

    def join(self, size: int, ends: Bool[Array, "B"], state: DoublingState) -> DoublingState:
        """Add what the last `size` inputs give the next `size` to the outputs of a turn."""
        at = state.place % state.turn
        added = long_conv_history(_at(state.past, state.place - size, size), self.taps, steps=size)
        here = _at(state.coming, at, size)
        return dataclasses.replace(
            state, coming=_put(state.coming, jnp.where(rows(ends, here), here + added, here), at)
        )


def _where_any(chosen: Bool[Array, "B"], change: Any, state: DoublingState) -> DoublingState:
    """Return `change(chosen, state)` if any row is chosen, else `state`."""
    return jax.lax.cond(jnp.any(chosen), change, lambda chosen, state: state, chosen, state)


def _at(x: Float[Array, "B D N"], start: Int[Array, "B"], size: int) -> Float[Array, "B D size"]:
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axis=-1))(x, start)


def _put(
    x: Float[Array, "B D N"], part: Float[Array, "B D M"], start: Int[Array, "B"]
) -> Float[Array, "B D N"]:
    put = lambda row, part, start: jax.lax.dynamic_update_slice_in_dim(row, part, start, axis=-1)  # noqa: E731
    return jax.vmap(put)(x, part, start)
