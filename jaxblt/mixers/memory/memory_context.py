"""MAC: attention within a segment, over what a memory gives back and the segment itself (Titans, memory as context)."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import named
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.open_chunk import by_document, lay_out, left_open, no_tokens, take_back
from jaxblt.mixers.driver.recording import keep_core
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.driver.steps import per_block
from jaxblt.mixers.linear.gated_delta_net import unit
from jaxblt.mixers.linear.matrix_state import Readout, Streams
from jaxblt.mixers.memory.neural_memory import (
    MemoryCarry,
    MemoryStreams,
    NeuralMemoryConfig,
    NeuralMemoryState,
    check_memory,
    empty_state,
    memory_gates,
    sow_trace,
    start_memory,
    start_state,
)
from jaxblt.validation import check_bounds
from pallas_kernels.neural_memory import (
    Chunk,
    MemoryState,
    Trace,
    choose,
    cut_rows,
    leave_windows,
    multiply,
    read_memory,
    scan_windows,
    take_windows,
    window_size,
    write_memory,
)

MATRICES = ("context_key", "context_value", "write_key", "write_value", "gate_query")
"""The matrices of each head: from what is retrieved to keys and values, from what attention found to what is written
and read.
"""


@dataclasses.dataclass(frozen=True)
class MACConfig(NeuralMemoryConfig):
    """Memory as context (MAC; Behrouz et al., 2501.00663, sec. 4.1), with segments of `chunk_size` tokens.

    A segment is read in four steps. The first three use the memory M from before the segment:

        h_i = f_M(q_i)                                          retrieve
        o_i = attention of q_i over [P persistent tokens, h_<=i, x_<=i]
        y_i = o_i * sigmoid(sqrt(K) f_M(o_i W_q)) + s * h_i     gate
        M'  = M updated by the keys and values of o             write

    The gate reads M and not M', because M' would show token i the rest of its segment. Each head has its own memory and
    attends to what this memory retrieves. The last term, s * h_i, is not in the paper: attention and gate together kept
    pairs from being learned (docs/notes/memory-as-context.md), so a trained scale s per channel, 1 at the start, adds
    what was retrieved directly.

    Attributes:
      persistent: P, the number of learned keys and values that every token sees.
      chunk_size: number of tokens C in a segment. In training, documents of packed rows must start at multiples of it.
        In a latent stack a calibrated `patcher.capacity` ensures this.
    """

    persistent: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "persistent", least=1)

    @property
    def training_grid(self) -> int:
        """Documents of packed rows must start at multiples of it in training."""
        return self.chunk_size

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> Any:
        """Build the module.

        Parameters are fp32, products in `dtype`, gates, softmax and memories in fp32.
        """
        return MAC(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> NeuralMemoryState:
        """Return the state of `NeuralMemoryConfig`, with queries of attention in the open segment."""
        return empty_state(self, batch_size, dtype, wide=3)


class MAC(nn.Module):
    """Retrieve, attend, gate, write, segment by segment (see `MACConfig`), then norm and output gate of `Readout`."""

    config: MACConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: NeuralMemoryState | None = None,
    ) -> tuple[Float[Array, "B T D"], NeuralMemoryState | None]:
        """Return the output and the next state (None in training); positions play no part.

        Raises:
          ValueError: documents may start inside of segments, or the state is of another config.
        """
        check_kind(NeuralMemoryState, state)
        config, clock, short, carry = self.config, None, None, None
        if state is not None:
            check_memory(config, state.carry)
            clock, short, carry = state.clock, state.short, state.carry
        elif segment_ids is not None and not config.aligned:
            times = config.chunk_size // math.gcd(config.chunk_size, config.segment_alignment)
            raise ValueError(
                f"MAC trains on documents that start at multiples of chunk_size = {config.chunk_size}, got "
                f"segment_alignment = {config.segment_alignment}: make data.alignment {times} times as large "
                "(or in a latent stack patcher.capacity a multiple of the chunk), or put one document in a row"
            )
        options: Any = {"width": config.dim, "alignment": config.segment_alignment}
        options["alone"] = not config.packed
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, **options)
        (q, k, v), short = Streams(config.shape, self.dtype, name="streams")(rows, short)
        gates = memory_gates(config.num_heads, self.dtype)(rows.x)
        traced = state is None and self.is_mutable_collection("metrics")
        core = ContextCore(start_memory(self, config), self._matrices(), config.chunk_size, traced)
        streams = MemoryStreams(q, k, v, *gates)
        keep_core(self, core, streams)
        (o, trace), after = rows.run(core, streams, carry)
        if trace is not None:
            sow_trace(self, rows, trace, gates[2])
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, carry=after)

    def _matrices(self) -> dict[str, Array]:
        heads, width = self.config.num_heads, self.config.shape.keys
        square = named(per_block(nn.initializers.lecun_normal(), 1), "heads", "head_dim", None)
        found = {name: self.param(name, square, (heads, width, width), jnp.float32) for name in MATRICES}
        init = named(nn.initializers.normal(width**-0.5), "heads", None, "head_dim")
        for name in ("persistent_key", "persistent_value"):
            found[name] = self.param(name, init, (heads, self.config.persistent, width), jnp.float32)
        ones = named(nn.initializers.ones, "heads", "head_dim")
        found["retrieved_scale"] = self.param("retrieved_scale", ones, (heads, width), jnp.float32)
        return found


@flax.struct.dataclass
class ContextCore:
    """Core of MAC; streams are `MemoryStreams`, outputs what is behind the gate and a `Trace` or None.

    Attributes:
      weights: M before a document.
      matrices: the rest of a head's weights, by name.
      chunk_size: C.
      traced: return a trace.
    """

    weights: tuple[Float[Array, "H _ _"], ...]
    matrices: dict[str, Float[Array, "H ..."]]
    chunk_size: int = flax.struct.field(pytree_node=False)
    traced: bool = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("weights", "matrices"))

    def zero(self, streams: MemoryStreams) -> MemoryCarry:
        """Return the memory before a document, and no tokens."""
        opened = no_tokens(_parts(streams), self.chunk_size)
        return MemoryCarry(start_state(self.weights, opened.count), opened, opened.count == 0)

    def run(
        self, streams: MemoryStreams, marks: Marks, carry: MemoryCarry | None
    ) -> tuple[tuple[Float[Array, "B T H K"], Trace | None], MemoryCarry | None]:
        """Return outputs; with a carry also what is carried behind the stretch."""
        fresh = self.zero(streams)
        if carry is None:
            return self._segments(streams, marks.segment_ids, fresh.memory)[0], None
        if marks.segment_ids is None:
            memory = choose(carry.begun[:, 0], carry.memory, fresh.memory)
            carry = MemoryCarry(memory, carry.opened, jnp.ones_like(carry.begun))

        def one(parts: Any, marks: Marks, carry: MemoryCarry) -> tuple[Array, MemoryCarry]:
            laid = lay_out(carry.opened, parts, marks)
            (y, _), memory = self._segments(MemoryStreams(*laid.streams), laid.segment_ids, carry.memory)
            opened = left_open(laid, self.chunk_size)
            opened = jax.tree.map(lambda new, old: new.astype(old.dtype), opened, carry.opened)
            return take_back(y, laid, parts[0].shape[1]), MemoryCarry(memory, opened, carry.begun)

        y, after = by_document(one, fresh, _parts(streams), marks, carry)
        return (y, None), after

    def _segments(
        self, streams: MemoryStreams, ids: Int[Array, "B T"] | None, memory: MemoryState
    ) -> tuple[tuple[Float[Array, "B T H K"], Trace | None], MemoryState]:
        """Run rows whose documents start on the grid of segments, from the memory that enters."""
        shape, kind = streams.q.shape[:2], streams.q.dtype
        width, length = window_size(self.chunk_size, shape[1]), shape[1]
        windows, _ = cut_rows(ids, (shape[0], length), width, aligned=True)
        if width < self.chunk_size:  # a window is no segment: none ends
            windows = windows._replace(ends=jnp.zeros_like(windows.ends))
        content = jnp.ones(shape, bool) if ids is None else ids > 0
        parts = tuple(take_windows(x, width) for x in _parts(streams))
        fresh = start_state(self.weights, jnp.zeros_like(parts[3][0, :, :, 0], jnp.int32))

        def step(state: MemoryState, window: Any) -> Any:
            parts, content, (begins, ends, *_) = window
            state = choose(begins, fresh, state)
            y, chunk = self.attend(state, parts, content, kind)
            written, trace = write_memory(state, chunk, kind)
            last = (jnp.arange(width) == width - 1)[None, None]
            ended = (ends & jnp.any(content, -1))[:, None, None] & last
            trace = jax.tree.map(lambda x: jnp.where(ended, x[..., None], 0), trace)
            return choose(ends, written, state), (y.astype(kind), trace if self.traced else None)

        content = take_windows(content[:, :, None], width)[:, :, 0]
        final, found = scan_windows(step, memory, (parts, content, tuple(windows)))
        return jax.tree.map(lambda x: leave_windows(x, length), found), final

    def attend(
        self, state: MemoryState, parts: tuple[Array, ...], content: Bool[Array, "B C"], kind: Any
    ) -> tuple[Float[Array, "B H C K"], Chunk]:
        """Return outputs of a segment, and what it writes, with the memory before it."""
        q, k, v, *gates = parts
        retrieved = read_memory(state.weights, unit(q), kind)
        keys = (self._learned("persistent_key", q), self._turned("context_key", retrieved, kind), k)
        values = (self._learned("persistent_value", q), self._turned("context_value", retrieved, kind), v)
        k, v = (jnp.concatenate([x.astype(kind) for x in some], 2) for some in (keys, values))
        scores = multiply("bhck,bhsk->bhcs", q, k, kind) / math.sqrt(q.shape[-1])
        own = jnp.tri(q.shape[2], dtype=bool)[None, None] & content[:, None, None]
        always = jnp.ones((*own.shape[:3], self.matrices["persistent_key"].shape[1]), bool)
        scores = jnp.where(jnp.concatenate([always, own, own], -1), scores, -jnp.inf)
        o = multiply("bhcs,bhsk->bhck", jax.nn.softmax(scores, -1), v, kind)
        seen = content[:, None, :, None]
        o, past = jnp.where(seen, o, 0), jnp.where(seen, retrieved, 0)
        key, value, query = (unit(self._turned(name, o, kind)) for name in MATRICES[2:])
        gate = jax.nn.sigmoid(math.sqrt(q.shape[-1]) * read_memory(state.weights, query, kind))
        past = past * self.matrices["retrieved_scale"][None, :, None]
        return o * gate + past, Chunk(key, value, *gates, content=content)

    def _turned(self, name: str, x: Float[Array, "B H C K"], kind: Any) -> Float[Array, "B H C K"]:
        return multiply("bhck,hkm->bhcm", x, self.matrices[name], kind)

    def _learned(self, name: str, like: Float[Array, "B H C K"]) -> Float[Array, "B H P K"]:
        learned = self.matrices[name]
        return jnp.zeros_like(like[:, :, :1], learned.dtype) + learned[None]


def _parts(streams: MemoryStreams) -> tuple[Array, ...]:
    return tuple(getattr(streams, field.name) for field in dataclasses.fields(streams))
