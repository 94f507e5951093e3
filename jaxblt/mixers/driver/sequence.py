"""The sequence driver: runs the core of a linear mixer over rows that are whole, streamed, prefilled or split.

A core is a pytree of weights with three pure functions. A *stretch* is a contiguous piece of each row; a *carry* is the
state between stretches. Only this module knows how rows are split over devices and calls:

    zero(streams) -> carry                          the carry before the first token of a document
    run(streams, marks, carry) -> (y, summary)      outputs of a stretch; carry None: every row starts a document
    join(carry, summary) -> carry                   the carry after a stretch, from the carry before it

`Rows` marks where documents begin, passes carries from device to device along a mesh axis `seq`, keeps the state of
rows that get no token, and zeroes outputs at holes.

Other methods are optional:

- `summarise(streams, marks) -> summary`, if that is cheaper than a run. The summary that `run` returns is then joined
  only with the carry that `run` was given.
- `observe(streams, marks) -> (summary, seen)` and `adjoint(streams, marks, seen, dy) -> summary`, if these are cheaper
  than differentiating a summary. `observe` returns the summary and the values that the backward pass keeps; `seen` is
  None if `adjoint` needs only the streams. `adjoint` summarises the gradient: joined with the gradient of the carry
  after the stretch, it gives the gradient of the carry before the stretch.
- `head_counts(streams)`: the numbers of heads of streams `[B, T, H, ...]` and carries `[B, H, ...]`. A mesh then splits
  heads over `tensor`.

A core without `join` gets whole rows, and `run` returns the carry after the stretch instead of a summary. Along `seq`
each device runs some of its heads. `jaxblt.mixers.driver.steps` loops over the tokens of such a core.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxblt.array_checks import check_whole
from jaxblt.mixers.driver.base import Clock, Tokens, arrange, blank, content_of, restore, select_rows
from jaxblt.mixers.driver.marks import Marks, mark
from jaxblt.parallel.carry import at_end, exclusive_scan
from jaxblt.parallel.halo import before, behind
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.scatter import over_heads
from jaxblt.parallel.sequence import SEQ_AXIS, SeqAxis, check_whole_rows, over_sequence, seq_axis
from jaxblt.parallel.tensor_heads import over_tensor, splits_heads
from pallas_kernels.runtime import OwnGradient, check_documents, is_symbolic

Carry = Any
Summary = Any
SHORTEST = 64
"""The fewest tokens per device for which a call with a state is split. Each device runs all of a shorter call."""


@runtime_checkable
class Core(Protocol):
    """The computation of a mixer along the sequence; see the module's docstring."""

    def zero(self, streams: Any, /) -> Carry: ...

    def run(self, streams: Any, marks: Marks, carry: Carry | None, /) -> tuple[Any, Summary]: ...


@runtime_checkable
class Joined(Core, Protocol):
    """A core whose stretches can be joined. Its `reach`, if any, is how many past steps a carry depends on."""

    def join(self, carry: Carry, summary: Summary, /) -> Carry: ...


@runtime_checkable
class Summarised(Joined, Protocol):
    """A core that can summarise a stretch without running it."""

    def summarise(self, streams: Any, marks: Marks, /) -> Summary: ...


@runtime_checkable
class Adjoined(Joined, Protocol):
    """A core without weights that summarises how a stretch changes the gradient of a carry, going backward."""

    def observe(self, streams: Any, marks: Marks, /) -> tuple[Summary, Any]: ...

    def adjoint(self, streams: Any, marks: Marks, seen: Any, dy: Any, /) -> Summary: ...


@runtime_checkable
class ByHead(Core, Protocol):
    """A core whose heads are independent, so that a mesh can split them over `tensor`."""

    def head_counts(self, streams: Any, /) -> tuple[int, ...]:
        """Return how many heads the streams have, such as of keys and of values."""
        ...


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens of a call, prepared for a mixer's cores.

    Attributes:
      x: inputs, with zeros at holes and padding.
      segment_ids: segment ids for operations: s > 0 a token, -s a hole, 0 no token; None for one document per row.
      content: mask of tokens; None if every position is a token.
      alignment: documents start at multiples of this number.
      axis: the mesh axis that can split such rows along the sequence, or None.
      split: whether that axis splits these rows.
      tokens: the tokens of a call with a state, else None.
      clock: the clock after the call, or None without a state.
    """

    x: Shaped[Array, "B T D"]
    segment_ids: Int[Array, "B T"] | None
    content: Bool[Array, "B T"] | None
    alignment: int
    axis: SeqAxis | None
    split: bool
    tokens: Tokens | None = None
    clock: Clock | None = None

    def run(
        self,
        core: Core,
        streams: Any,
        carry: Carry | None = None,
        *,
        time_axis: int = 1,
        reverse: bool = False,
    ) -> tuple[Any, Carry | None]:
        """Run a core and return its outputs and the carry after the call (None if `carry` is None).

        Args:
          core: a core with its weights.
          streams: pytree of arrays [B, T, ...], or [B, D, T] with `time_axis` 2.
          carry: the state's carry; None in a call without a state.
          time_axis: the axis of time in streams and outputs.
          reverse: read rows from the end.

        Raises:
          ValueError: the carry belongs to another config.
        """
        if carry is not None:
            _check_carry(core, streams, carry)
        stretch = _Stretch(time_axis, reverse, self.alignment, entered=int(carry is not None))
        joined = isinstance(core, Joined)
        if (
            isinstance(core, ByHead)
            and splits_heads(core.head_counts(streams))
            and (joined or not self.split)
        ):
            own = functools.partial(_stretch if self.split else _whole, stretch)
            given = (core, streams, self.segment_ids, carry)
            return over_tensor(own, *given, time_axis=time_axis, sequenced=self.split)
        if not self.split:
            work = lambda given, core: _whole(stretch, core, *given)  # noqa: E731
            return over_batch(work, (streams, self.segment_ids, carry), core)
        if joined:
            return _folded(stretch, core, streams, self.segment_ids, carry)
        work = lambda *given: _whole(stretch, *given)  # noqa: E731
        return over_heads(work, core, streams, self.segment_ids, carry, time_axis=time_axis)

    @property
    def length(self) -> int:
        """Length of a whole row."""
        return self.x.shape[1] if self.axis is None else self.axis.whole(self.x.shape[1])

    @property
    def arranged(self) -> Tokens:
        """The tokens of a call with a state."""
        assert self.tokens is not None
        return self.tokens

    def clear(self, z: Shaped[Array, "B E T"]) -> Shaped[Array, "B E T"]:
        """Zero projections at holes and padding, for operations that get no segment ids."""
        if self.content is None or self.segment_ids is not None:
            return z
        return jnp.where(self.content[:, None], z, jnp.zeros((), z.dtype))

    def restore(self, y: Shaped[Array, "B T D"]) -> Shaped[Array, "B T D"]:
        """Put the mixer's output in the order of the call, zero at holes and padding."""
        if self.tokens is not None:
            return restore(y, self.tokens)
        return blank(y, self.content)


def read(
    x: Shaped[Array, "B T D"],
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
    clock: Clock | None,
    *,
    width: int | None = None,
    alignment: int = 1,
    packed: bool = True,
    alone: bool = False,
) -> Rows:
    """Read the tokens of a mixer's call.

    Args:
      x: inputs.
      segment_ids, positions: the mixer's arguments.
      clock: the clock of the mixer's state, or None in training.
      width: `dim` of the mixer's config, which x must have; None allows any.
      alignment: in training documents start at multiples of this number.
      packed: False promises one document per row; operations then get no segment ids.
      alone: also promises one document per row, but operations get segment ids.

    Raises:
      ValueError: there is no token, an array has a wrong shape or dtype, documents break a promise, or the state has
        another number of rows.
    """
    check_call(x, segment_ids, positions, clock, width=width)
    if clock is not None and is_symbolic(x.shape[1]):
        raise ValueError(
            f"a call with a state is compiled for one number of tokens, got a symbolic one, {x.shape[1]}: export "
            "one program for each number, such as 1 for decoding"
        )
    split = clock is not None and splits_call(x.shape[1])
    axis = seq_axis(x)
    if clock is not None:
        check_whole_rows(x, "a call with a state")
        tokens, clock = arrange(x, segment_ids, positions, clock, split=split)
        return Rows(tokens.x, tokens.documents, tokens.content, 1, axis, split, tokens, clock)
    check_documents(segment_ids, alignment if packed and not alone else None)
    content = content_of(segment_ids)
    ids = segment_ids if packed else None
    return Rows(blank(x, content), ids, content, alignment, axis, axis is not None)


def check_call(
    x: Any, segment_ids: Any, positions: Any, clock: Clock | None = None, *, width: int | None = None
) -> None:
    """Raise ValueError unless the arrays of a call fit each other, `clock` and `width`."""
    if len(x.shape) != 3:
        fix = "write x[None] for one row" if len(x.shape) == 2 else "reshape it, or map the call by jax.vmap"
        raise ValueError(f"a mixer reads x of shape [rows, tokens, width], got {x.shape}: {fix}")
    if 0 in x.shape[:2]:
        raise ValueError(
            f"a mixer reads at least one row and one token, got x {x.shape}: leave empty calls out"
        )
    if width is not None and x.shape[-1] != width:
        # Weights are made for x: without this check the mixer would be built for its width and return another.
        raise ValueError(
            f"a mixer of dim = {width} reads x of width {width}, got {x.shape}: set dim={x.shape[-1]} in its config, "
            f"or project x to {width}"
        )
    for name, array in (("segment_ids", segment_ids), ("positions", positions)):
        if array is None:
            continue
        check_whole(name, array)
        if array.shape != x.shape[:2]:
            raise ValueError(
                f"{name} must have shape {x.shape[:2]}, one for each token of x, got {array.shape}"
            )
    if clock is not None and clock.time.shape != x.shape[:1]:
        raise ValueError(
            f"x has {x.shape[0]} rows and the state {clock.time.shape[0]}: make it by init_state of as many rows"
        )


def check_kind(kind: type, state: Any, **own: Any) -> None:
    """Raise ValueError for the state of another mixer or config, which may have fields of the same names and shapes.

    Args:
      kind: class of the caller's states.
      state: the state that the caller got; None passes.
      own: fields of a state that say what its arrays mean, with the values of the caller's config.
    """
    if state is None:
        return
    if not isinstance(state, kind):
        raise ValueError(
            f"the state is a {type(state).__name__}, expected a {kind.__name__}: make it by init_state of the same "
            "config"
        )
    for name, value in own.items():
        if (held := getattr(state, name)) != value:
            raise ValueError(
                f"the state is of {name} = {held}, and the config of {value}: make it by init_state of the same config"
            )


def _check_carry(core: Core, streams: Any, carry: Carry) -> None:
    """Raise ValueError for a carry of another config's core: some would run, with meaningless outputs.

    A core without `join` does not know the length of its carry. A last axis of size 1 in its `zero` then fits any size.
    """
    own, kind = jax.tree.flatten(jax.eval_shape(core.zero, streams))
    given, other = jax.tree.flatten(carry)
    shapes = [[x.shape for x in leaves] for leaves in (own, given)]
    unknown = not isinstance(core, Joined)
    fits = kind == other and all(
        a == b or (unknown and len(a) == len(b) and a[-1:] == (1,) and a[:-1] == b[:-1])
        for a, b in zip(*shapes, strict=True)
    )
    if not fits:
        raise ValueError(
            f"the state holds {shapes[1]} for {type(core).__name__}, expected {shapes[0]}: make it by init_state of "
            "the same config"
        )


def splits_call(length: int) -> bool:
    """Return whether a call of `length` tokens with a state is split along the sequence; outputs are the same."""
    axis = seq_axis()
    return axis is not None and length >= SHORTEST * axis.size


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """How a run reads its arrays; `entered` is the id of the document to which the first carry belongs."""

    time_axis: int
    reverse: bool
    alignment: int
    entered: int

    def turn(self, tree: Any, axis: int) -> Any:
        """Put arrays in reading order, or back."""
        return jax.tree.map(lambda x: jnp.flip(x, axis), tree) if self.reverse else tree


def _whole(
    how: _Stretch, core: Core, streams: Any, segment_ids: Int[Array, "B T"] | None, carry: Carry | None
) -> tuple[Any, Carry | None]:
    """Run a core over rows of which this device has the whole."""
    streams, ids = how.turn(streams, how.time_axis), how.turn(segment_ids, 1)
    marks = mark(ids, how.entered, alignment=1 if how.reverse else how.alignment)
    enters = None if carry is None else _begun(core, streams, marks.begins, carry)
    y, after = core.run(streams, marks, enters)
    y = how.turn(y, how.time_axis)
    if carry is None:
        return y, None
    if isinstance(core, Joined):
        after = core.join(enters, after)
    return y, _kept(marks.takes, after, carry)


def _folded(
    how: _Stretch, core: Joined, streams: Any, segment_ids: Int[Array, "B T"] | None, carry: Carry | None
) -> tuple[Any, Carry | None]:
    """Run a core over rows split along the sequence: each device's stretch starts from the carry of earlier devices."""
    row = how.time_axis == 2
    ids = segment_ids[:, None] if row and segment_ids is not None else segment_ids

    def island(sequenced: Any, carry: Carry | None, core: Joined) -> tuple[Any, Carry | None]:
        streams, ids = sequenced
        return _stretch(how, core, streams, ids[:, 0] if row and ids is not None else ids, carry)

    outputs = (True, False)
    return over_sequence(island, (streams, ids), carry, core, time_axis=how.time_axis, outputs=outputs)


def _stretch(
    how: _Stretch, core: Joined, streams: Any, segment_ids: Int[Array, "B T"] | None, carry: Carry | None
) -> tuple[Any, Carry | None]:
    """Run one device's stretch, inside an island over the sequence."""
    length = jax.tree.leaves(streams)[0].shape[how.time_axis]
    marks = _own_marks(how, segment_ids, length)
    streams = how.turn(streams, how.time_axis)
    if carry is None and isinstance(core, Adjoined):
        return how.turn(_linked(how, core)(streams, marks), how.time_axis), None
    start = core.zero(streams) if carry is None else carry
    entering, step = _entering(how, core, streams, marks, _summary(core, streams, marks), start)
    y, _ = core.run(streams, marks, _begun(core, streams, marks.begins, entering))
    y = how.turn(y, how.time_axis)
    return y, None if carry is None else at_end(step(entering), marks.takes, carry)


def _summary(core: Joined, streams: Any, marks: Marks) -> Summary:
    """Return the summary of a stretch, in the cheapest way that the core has."""
    if isinstance(core, Adjoined):
        return core.observe(streams, marks)[0]
    if isinstance(core, Summarised):
        return core.summarise(streams, marks)
    return core.run(streams, marks, None)[1]


def _entering(
    how: _Stretch, core: Joined, streams: Any, marks: Marks, summary: Summary, start: Carry
) -> tuple[Carry, Callable[[Carry], Carry]]:
    """Return the carry before this device's stretch, and the function that maps it to the carry after the stretch.

    `start` is the carry before the first device.
    """
    effect = (summary, marks.begins, marks.takes)

    def step(carry: Carry, effect: Any = effect) -> Carry:
        summary, begins, takes = effect
        return _kept(takes, core.join(_begun(core, streams, begins, carry), summary), carry)

    reach = getattr(core, "reach", None)
    hops = None if reach is None else -(-reach // jax.tree.leaves(streams)[0].shape[how.time_axis])
    return exclusive_scan(step, start, effect, reverse=how.reverse, hops=hops), step


def _linked(how: _Stretch, core: Adjoined) -> Callable[[Any, Marks], Any]:
    """Return `(streams, marks) -> y` for a device's stretch, with a hand-written backward pass.

    The forward pass sends carries from device to device. The backward pass sends gradients of carries in the opposite
    direction, so no summary is differentiated.
    """

    def entered(streams: Any, marks: Marks) -> tuple[Carry, Any]:
        summary, seen = core.observe(streams, marks)
        entering, _ = _entering(how, core, streams, marks, summary, core.zero(streams))
        return _begun(core, streams, marks.begins, entering), seen

    def forward(streams: Any, marks: Marks) -> tuple[Any, Any]:
        enters, seen = entered(streams, marks)

        def run(streams: Any) -> tuple[Any, Carry]:
            y, summary = core.run(streams, marks, enters)
            return y, core.join(enters, summary)

        (y, _), back = jax.vjp(run, streams)
        return y, (back, seen, streams, marks)

    def backward(kept: Any, dy: Any) -> tuple[Any, None]:
        back, seen, streams, marks = kept

        def step(gradient: Carry, effect: Any) -> Carry:
            adjoint, begins, takes = effect
            return _kept(takes, _begun(core, streams, begins, core.join(gradient, adjoint)), gradient)

        effect = (core.adjoint(streams, marks, seen, dy), marks.begins, marks.takes)
        leaving = exclusive_scan(step, core.zero(streams), effect, reverse=not how.reverse)
        return (*back((dy, leaving)), None)

    linked = OwnGradient(lambda streams, marks: core.run(streams, marks, entered(streams, marks)[0])[0])
    linked.defvjp(forward, backward)
    return linked


def _own_marks(how: _Stretch, segment_ids: Int[Array, "B T"] | None, length: int) -> Marks:
    """Mark a device's stretch in reading order; its first document may begin on another device."""
    alignment = 1 if how.reverse else math.gcd(how.alignment, length)
    if segment_ids is None:
        return mark(None, alignment=alignment)
    neighbour = behind if how.reverse else before
    past = neighbour(jnp.abs(segment_ids), 1, axis=1)[:, 0]
    if how.entered:
        past = jnp.where(jax.lax.axis_index(SEQ_AXIS) == 0, how.entered, past)
    return mark(how.turn(segment_ids, 1), past, alignment=alignment)


def _begun(core: Core, streams: Any, begins: Bool[Array, "B"] | None, carry: Carry) -> Carry:
    """Reset the carry to zero in rows whose next token begins a document."""
    return carry if begins is None else select_rows(begins, core.zero(streams), carry)


def _kept(takes: Bool[Array, "B"] | None, after: Carry, carry: Carry) -> Carry:
    """Return the carry after a stretch; rows that took no token keep the old one bit by bit."""
    like = jax.tree.map(lambda new, old: new.astype(old.dtype), after, carry)
    return like if takes is None else select_rows(takes, like, carry)
