"""A neural Turing machine: a differentiable memory of each row, stepped token by token (1410.5401).

Every head has a memory of its own, one address that writes and one that reads. Where a mesh splits the sequence, heads
are scattered over its devices.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, named
from jaxblt.mixers.cells.experimental.addressing import (
    SHIFTS,
    erase_and_add,
    focus,
    focus_size,
    place,
    recall,
)
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.driver.steps import check_causal, per_block, take_steps
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields

WRITES, READS = 0, 1
ADDRESSES = 2


@dataclasses.dataclass(frozen=True)
class NTMConfig:
    """A neural Turing machine with a linear controller (1410.5401, sec. 3).

    The controller of a head gets the token and what the head read at the previous token. It computes the addresses for
    writing and reading (`experimental.addressing`), what to erase, in 0..1, and what to add, in -1..1. The bound keeps
    the memory from growing without end through the feedback of what is read. Addresses are computed from the memory
    before the write; the read follows the write. A document begins with an empty memory and both addresses on the first
    slot, because from evenly spread addresses no slot could become different from the others.

    Attributes:
      dim: width D.
      num_heads: heads H, each with a memory; a multiple of the devices that split the sequence.
      slots: number of slots N of a memory. To recall symbols one by one, the memory needs a slot per symbol.
      width: width M of a slot.
      causal: True; the machine steps forward only.
    """

    dim: int
    num_heads: int = 4
    slots: int = 128
    width: int = 16
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "num_heads", "width", least=1)
        check_bounds(self, "slots", least=SHIFTS, why=": a shift moves to either neighbour")
        check_causal(self)

    @property
    def controls(self) -> int:
        """Numbers that a controller gives for each head and token: two addresses, what to erase, what to add."""
        return ADDRESSES * focus_size(self.width) + 2 * self.width

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "NTM":
        """Build the module.

        Parameters are fp32, projections in `dtype`, memory and addresses in fp32.
        """
        return NTM(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "NTMState":
        """Return an empty memory with addresses on its first slot, in fp32."""
        like = jnp.zeros((batch_size, self.num_heads), jnp.float32)
        return NTMState(start_clock(batch_size), empty_tape(like, self.slots, self.width))


@flax.struct.dataclass
class Tape:
    """The memory and addresses that a head carries from token to token.

    Attributes:
      memory: M.
      weights: where it last wrote and read.
      seen: what it last read.
    """

    memory: Float[Array, "B H N M"]
    weights: Float[Array, "B H 2 N"]
    seen: Float[Array, "B H M"]

    __repr__ = show


@flax.struct.dataclass
class NTMState:
    """The clock of each row, and its memory."""

    clock: Clock
    tape: Tape


def empty_tape(like: Float[Array, "B H"], count: int, width: int) -> Tape:
    """Return the tape before a document: `count` slots of zeros, addresses on the first.

    `like` gives rows and heads.
    """
    nothing = jnp.zeros_like(like, jnp.float32)[..., None, None]
    first = jax.nn.one_hot(0, count, dtype=jnp.float32).reshape(1, 1, 1, count)
    return Tape(
        memory=jnp.tile(nothing, (1, 1, count, width)),
        weights=jnp.tile(nothing, (1, 1, ADDRESSES, 1)) + first,
        seen=jnp.tile(nothing[..., 0], (1, 1, width)),
    )


class NTM(nn.Module):
    """y = what the heads read, times W_out. One product projects the inputs of all steps."""

    config: NTMConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: NTMState | None = None,
    ) -> tuple[Float[Array, "B T D"], NTMState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config = self.config
        check_kind(NTMState, state)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        sizes = {"h": config.num_heads, "p": config.controls}
        names, bias = ("embed", "heads", None), nn.initializers.zeros
        asked = Linear("btd,dhp->bthp", sizes, names, self.dtype, bias=bias, name="in")(rows.x)
        core = NTMCore(self._feedback(), config.slots)
        seen, tape = rows.run(core, asked, None if state is None else state.tape)
        names = ("heads", "head_dim", "embed")
        out = Linear("bthm,hmd->btd", {"d": config.dim}, names, self.dtype, name="out")
        after = None if state is None else dataclasses.replace(state, clock=rows.clock, tape=tape)
        return rows.restore(out(seen)), after

    def _feedback(self) -> Float[Array, "H M P"]:
        shape = (self.config.num_heads, self.config.width, self.config.controls)
        init = named(per_block(nn.initializers.lecun_normal(), 1), "heads", "head_dim", None)
        return self.param("feedback", init, shape, jnp.float32)


@flax.struct.dataclass
class NTMCore:
    """Core of the machine, in fp32. Streams are the controller's share of the inputs, [B, T, H, P].

    Attributes:
      feedback: of what was read at the token before, to the controller's numbers.
      count: slots.
    """

    feedback: Float[Array, "H M P"]
    count: int = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("feedback",))

    def zero(self, streams: Float[Array, "B T H P"]) -> Tape:
        """Return the tape before the first token."""
        return empty_tape(streams[:, 0, :, 0], self.count, self.feedback.shape[1])

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (streams.shape[2],)

    def run(
        self, streams: Float[Array, "B T H P"], marks: Marks, carry: Tape | None
    ) -> tuple[Float[Array, "B T H M"], Tape]:
        """Return what is read at each position, and the tape behind the stretch."""

        def step(tape: Tape, asked: Array) -> tuple[Tape, Array]:
            after = self._step(tape, asked.astype(jnp.float32))
            return after, after.seen.astype(asked.dtype)

        # Compute a step again in the backward pass: its intermediates are several times the memory.
        return take_steps(step, self.zero(streams), streams, marks, carry, remat=True)

    def _step(self, tape: Tape, asked: Float[Array, "B H P"]) -> Tape:
        width = self.feedback.shape[1]
        recalled = jnp.einsum("bhm,hmp->bhp", tape.seen, self.feedback, precision=jax.lax.Precision.HIGHEST)
        erase, add, raw = jnp.split(asked + recalled, [width, 2 * width], -1)
        asked_for = focus(raw.reshape(*raw.shape[:2], ADDRESSES, -1), width)
        weights = place(tape.memory, tape.weights, asked_for)
        memory = erase_and_add(tape.memory, weights[:, :, WRITES], jax.nn.sigmoid(erase), jnp.tanh(add))
        return Tape(memory, weights, recall(memory, weights[:, :, READS]))
