"""The course of a memory under a passage, token by token: surprise, lengths and forgetting, or reads and age of slots.

The functions are those of the model's own pass. They run again over what the pass brought to the memory, one chunk
after another, and tell more than the means that training logs.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.memory.memory_context import ContextCore
from jaxblt.mixers.memory.neural_memory import MemoryCore, start_state
from jaxblt.mixers.slots.experimental.slot_bank import read_slots
from jaxblt.mixers.slots.experimental.slot_core import SlotCore
from pallas_kernels.neural_memory import (
    Chunk,
    MemoryState,
    leave_windows,
    read_memory,
    take_windows,
    write_memory,
)


@flax.struct.dataclass
class MemoryPassage:
    """A neural memory by token and head.

    Attributes:
      surprise: |f_M(k) - v|^2 / 2 of the token's key and value, with the memory M that the token reads.
      norm: length of all of that M.
      alpha: share of the memory that the token asks to forget.
    """

    surprise: Float[Array, "T H"]
    norm: Float[Array, "T H"]
    alpha: Float[Array, "T H"]


@flax.struct.dataclass
class SlotPassage:
    """A slot memory by head and slot.

    Attributes:
      reads: weight with which each token reads each slot.
      usage: of the slots that each interval's tokens read.
      age: of these slots, in intervals since the last write.
      valid: those that hold something; the others are free.
    """

    reads: Float[Array, "T H S"]
    usage: Float[Array, "N H S"]
    age: Int[Array, "N H S"]
    valid: Bool[Array, "N H S"]


def follow(core: Any, streams: Any) -> MemoryPassage | SlotPassage:
    """Return what a memory did in a call without a state, in the first row.

    Its tokens are all of one document.

    Args:
      core: that a mixer kept, see `jaxblt.mixers.driver.recording`.
      streams: kept with it.
    """
    streams = jax.tree.map(lambda x: x[:1], streams)
    return _follow_slots(core, streams) if isinstance(core, SlotCore) else _follow_memory(core, streams)


def span_of(core: Any) -> int:
    """Return the number of tokens from one write of a kept core to the next."""
    return core.config.interval if isinstance(core, SlotCore) else core.chunk_size


def _follow_memory(core: MemoryCore | ContextCore, streams: Any) -> MemoryPassage:
    kind = streams.q.dtype
    parts = (streams.q, streams.k, streams.v, streams.theta, streams.eta, streams.alpha)

    def step(memory: MemoryState, span: Any) -> tuple[MemoryState, Any]:
        parts, content = span
        chunk = Chunk(*parts[1:], content=content)
        if isinstance(core, ContextCore):
            _, chunk = core.attend(memory, parts, content, kind)
        found = read_memory(memory.weights, chunk.k, kind)
        surprise = jnp.sum(jnp.square(found - chunk.v.astype(found.dtype)), -1) / 2
        squares = jnp.stack([jnp.sum(m * m, (-2, -1)) for m in memory.weights])
        norm = jnp.sqrt(jnp.sum(squares, 0))[..., None]
        told = (surprise, jnp.broadcast_to(norm, surprise.shape), chunk.alpha)
        return write_memory(memory, chunk, kind)[0], told

    fresh = start_state(core.weights, jnp.zeros_like(streams.theta[:, 0], jnp.int32))
    _, told = jax.lax.scan(step, fresh, _spans(parts, core.chunk_size))
    return MemoryPassage(*(leave_windows(x, streams.q.shape[1])[0] for x in told))


def _follow_slots(core: SlotCore, streams: Any) -> SlotPassage:
    kind = streams.q.dtype

    def step(bank: Any, span: Any) -> tuple[Any, Any]:
        parts, content = span
        _, reads = read_slots(bank, parts[0], core.sink, kind)
        return core.write(bank, parts, content, None)[0], (reads, bank.usage[0], bank.age[0], bank.valid[0])

    spans = _spans(streams.kept, core.config.interval)
    _, (reads, *banks) = jax.lax.scan(step, core.zero(streams).bank, spans)
    return SlotPassage(leave_windows(reads, streams.q.shape[1])[0], *banks)


def _spans(parts: tuple[Array, ...], span: int) -> Any:
    """Cut streams [1, T, H, ...] into [N, 1, H, C, ...] from write to write.

    Also returns which places hold tokens, [N, 1, C]. A last span that is not full is written too, to a memory that
    nothing reads.
    """
    content = jnp.ones((*parts[0].shape[:2], 1), bool)
    return tuple(take_windows(x, span) for x in parts), take_windows(content, span)[:, :, 0]
