"""The contract of sequence mixers, and the bookkeeping of segments and state that they share.

A mixer is a Linen module `(x, *, segment_ids, positions, state) -> (y, state)` built from a frozen config.

The segment id of a position says what it holds. An id s > 0 is a token of document s. The id -s is a hole inside
document s, which counts as a time step but holds no token. The id 0 is no token and changes no bit of the state.

Time counts the tokens and holes of a document. Windows, convolutions and caches measure distance in time. `positions`
are only for position encodings; by default they equal the time.
"""

from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from jaxblt.parallel.sequence import whole_rows
from jaxblt.show import show
from jaxblt.validation import whole

State = Any
"""A pytree whose leaves have the batch as leading axis.

A state whose `capacity` is a number holds documents of at most that many tokens, and has a `clock`. The size of any
other state does not depend on the length of documents.
"""


@runtime_checkable
class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer. `dim` is the width D of its input and output."""

    @property
    def dim(self) -> int: ...

    @property
    def causal(self) -> bool: ...

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
        """Build the module, with fp32 parameters, which computes in `dtype`."""
        ...

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> State:
        """Return the state before the first token, for documents of at most `capacity` tokens."""
        ...


def init_state(config: MixerConfig, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> State:
    """Return the state of `config`'s mixer before the first token, for `batch_size` rows.

    Args:
      config: the mixer's frozen config.
      batch_size: number of rows; each advances by itself.
      capacity: the most tokens (holes included) of a document. It matters for mixers that keep their past: attention
        and implicit filters.
      dtype: dtype of caches; accumulators are always fp32.

    Raises:
      ValueError: the mixer is bidirectional, the number of rows is not a whole number, or the capacity is not positive
        or is more than the mixer can hold.
    """
    if not config.causal:
        raise ValueError("a bidirectional mixer has no state: set causal=True to decode or stream")
    whole("batch_size", batch_size, least=0)
    whole("capacity", capacity, least=1, why=": the most tokens of a document")
    return config.init_state(batch_size, capacity=capacity, dtype=dtype)


@flax.struct.dataclass
class Clock:
    """The position of each row in its document: the part of the state that every mixer has.

    Attributes:
      time: number of tokens and holes of the current document so far.
      position: position of the next token, if it continues the document and no position is given.
      last_segment: |segment id| of the last token; 0 before the first.
    """

    time: Int[Array, "B"]
    position: Int[Array, "B"]
    last_segment: Int[Array, "B"]

    __repr__ = show


def start_clock(batch_size: int) -> Clock:
    """Return the clock before the first token."""
    return Clock(*(jnp.zeros((batch_size,), jnp.int32) for _ in range(3)))


@flax.struct.dataclass
class Tokens:
    """The tokens and holes of one call, moved to the front of each row.

    Attributes:
      x: inputs, reordered; zero at holes and at positions without a token.
      order: the index in the call that each position came from.
      live: True for tokens and holes.
      content: True for tokens, False for holes.
      run: number of the document within the call: 0 if it continues the state's document, then 1, 2, ...; -1 without a
        token.
      time: steps since the start of the document.
      positions: positions for the position encoding: those of the call, or `time`.
      whole: True if it is known while tracing that every index is a token, and all belong to one document.
      moved: whether tokens may have changed places.
    """

    x: Shaped[Array, "B T D"]
    order: Int[Array, "B T"]
    live: Bool[Array, "B T"]
    content: Bool[Array, "B T"]
    run: Int[Array, "B T"]
    time: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    whole: bool = flax.struct.field(pytree_node=False)
    moved: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def documents(self) -> Int[Array, "B T"] | None:
        """Segment ids of the tokens, where ±1 is the state's document; None if all are of one document."""
        if self.whole:
            return None
        document = jnp.where(self.live, self.run + 1, 0)
        return jnp.where(self.content, document, -document)


def arrange(
    x: Shaped[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
    clock: Clock,
    *,
    split: bool = False,
) -> tuple[Tokens, Clock]:
    """Move a call's tokens and holes to the front of each row, and count time on from the state's `clock`.

    So with a state a mixer only sees rows of tokens and holes, followed by positions without a token. Without segment
    ids every index is a token that continues the row's document. If a mesh has `split` the call along the sequence,
    nothing moves. Positions without a token must then follow the tokens of their row; otherwise the whole row becomes
    NaN.
    """
    moved = not split and x.shape[1] > 1
    index = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
    if segment_ids is None:
        order, segments = index, jnp.broadcast_to(jnp.maximum(clock.last_segment, 1)[:, None], x.shape[:2])
    elif split:
        order, segments = index, whole_rows(segment_ids)
        behind = jnp.all((segments[:, 1:] == 0) | (segments[:, :-1] != 0), 1)
        wrong = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0
        x = jnp.where(rows(behind, x), x, jnp.asarray(wrong, x.dtype))
    elif not moved:
        order, segments = index, segment_ids
    else:
        order = jnp.argsort(segment_ids == 0, axis=1, stable=True).astype(jnp.int32)
        segments = jnp.take_along_axis(segment_ids, order, 1)
        x = jnp.take_along_axis(x, order[..., None], 1)
    document, live, content = jnp.abs(segments), segments != 0, segments > 0
    if segment_ids is None:
        first = (clock.last_segment == 0).astype(jnp.int32)
        run, since_start = jnp.broadcast_to(first[:, None], index.shape), index
    else:
        changed = document != jnp.concatenate([clock.last_segment[:, None], document[:, :-1]], 1)
        run = jnp.where(live, jnp.cumsum(changed, axis=1, dtype=jnp.int32), -1)
        since_start = index - jax.lax.cummax(jnp.where(changed, index, -1), axis=1)
    continues = run == 0
    time = jnp.where(continues, clock.time[:, None] + index, since_start)
    if positions is None:
        ordered = jnp.where(continues, clock.position[:, None] + index, since_start)
    else:
        ordered = jnp.take_along_axis(positions, order, 1) if moved else positions
    if split and segment_ids is not None:
        run, time, ordered = (whole_rows(counted) for counted in (run, time, ordered))
    tokens = Tokens(
        x=blank(x, content),
        order=order,
        live=live,
        content=content,
        run=run,
        time=time,
        positions=ordered,
        whole=segment_ids is None,
        moved=moved,
    )
    return tokens, _advance(clock, tokens, document)


def _advance(clock: Clock, tokens: Tokens, document: Int[Array, "B T"]) -> Clock:
    count = jnp.sum(tokens.live, 1, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]

    def at_end(values: Int[Array, "B T"], old: Int[Array, "B"], step: int) -> Int[Array, "B"]:
        return jnp.where(count > 0, jnp.take_along_axis(values, last, 1)[:, 0] + step, old)

    return Clock(
        time=at_end(tokens.time, clock.time, 1),
        position=at_end(tokens.positions, clock.position, 1),
        last_segment=at_end(document, clock.last_segment, 0),
    )


def restore(y: Shaped[Array, "B T D"], tokens: Tokens) -> Shaped[Array, "B T D"]:
    """Put outputs back in the order of the call, with zeros at holes and at positions without a token."""
    if tokens.whole:
        return y
    y = blank(y, tokens.content)
    if not tokens.moved:
        return y
    back = jnp.argsort(tokens.order, axis=1).astype(jnp.int32)
    return jnp.take_along_axis(y, back[..., None], 1)


def last_run(tokens: Tokens) -> Int[Array, "B"]:
    """Return the number of the document in which each row ends: 0 if the call began no new document."""
    return jnp.maximum(jnp.max(tokens.run, axis=1), 0)


def content_of(segment_ids: Int[Array, "B T"] | None) -> Bool[Array, "B T"] | None:
    """Return a mask of tokens, or None if every position is a token."""
    return None if segment_ids is None else segment_ids > 0


def blank(x: Shaped[Array, "B T D"], content: Bool[Array, "B T"] | None) -> Shaped[Array, "B T D"]:
    """Return x with zeros at holes and padding, or x itself if `content` is None.

    Gradients at holes are zero. It selects instead of multiplying by a mask, because NaN times 0 is NaN, also in the
    gradient of weights that multiply x.
    """
    return x if content is None else jnp.where(content[..., None], x, jnp.zeros((), x.dtype))


def rows(mask: Bool[Array, "B"], like: Array) -> Array:
    """Return `mask` with as many axes as `like`, for a `jnp.where` over its rows."""
    return mask.reshape((-1,) + (1,) * (like.ndim - 1))


def select_rows(chosen: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """Return the rows of `new` where `chosen`, else those of `old`.

    Both are pytrees of arrays [B, ...]; the dtypes are those of `old`.
    """
    return jax.tree.map(lambda a, b: jnp.where(rows(chosen, b), a.astype(b.dtype), b), new, old)


def check_capacity(state: State, *, more: int = 0) -> None:
    """Raise on the host if a row holds more tokens than its state's capacity, or would with `more` tokens.

    Inside jit nothing raises: a document beyond the capacity loses its oldest tokens. A decoding loop calls this
    function with a concrete state, before it feeds tokens or now and then. The call waits for the device.

    Args:
      state: any pytree that holds mixer states, stacked over layers or not.
      more: number of tokens that every row will get next.

    Raises:
      ValueError: names the first row beyond its capacity, its position, the capacity and the fix.
    """

    def bounded(node: Any) -> bool:
        return isinstance(getattr(node, "capacity", None), int) and hasattr(node, "clock")

    for node in jax.tree.leaves(state, is_leaf=bounded):
        if not bounded(node):
            continue
        time = np.atleast_1d(np.asarray(node.clock.time)).reshape(-1, np.shape(node.clock.time)[-1]).max(0)
        row = int(np.argmax(time))
        if time[row] + more > node.capacity:
            raise ValueError(
                f"row {row} is at position {time[row]} of its document and {more} more tokens were asked for, but "
                f"{type(node).__name__} holds {node.capacity}: call init_state(capacity={time[row] + more}) or more, "
                "or start a new document"
            )
