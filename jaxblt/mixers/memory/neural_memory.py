"""Long-term memory: weights per row and head that learn by gradient descent while the row is read (Titans)."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.open_chunk import OpenChunk, append, lay_out, left_open, no_tokens, take_back
from jaxblt.mixers.driver.recording import keep_core
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.mixers.driver.steps import check_causal, check_divides, per_block
from jaxblt.mixers.linear.gated_delta_net import unit
from jaxblt.mixers.linear.matrix_state import HeadShape, Readout, Streams
from jaxblt.show import show
from jaxblt.side_outputs import sow_metric
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.neural_memory import (
    Chunk,
    MemoryState,
    Trace,
    neural_memory,
    read_memory,
    write_memory,
)
from pallas_kernels.runtime import vary_alike

GATES = {"theta": 0.0, "eta": 0.0, "alpha": -4.0}
"""Gates of a token, and where they start before the sigmoid: a memory forgets 2 % a chunk at first."""


@dataclasses.dataclass(frozen=True)
class NeuralMemoryConfig:
    """M <- (1 - alpha) M + S, S <- eta S - grad |f_M(k) - v|^2 / 2, read by f_M(q) (Behrouz et al., 2501.00663).

    A Titans memory: M are the weights of a small network f, which learn while the row is read. They are updated once
    every `chunk_size` tokens of a document, and each token reads the M of the last update
    (`pallas_kernels.neural_memory`). Within a chunk tokens reach each other only through the short convolutions. So put
    attention over a window of at least `chunk_size` beside the memory, as `MAGConfig` does.

    Attributes:
      dim: width D.
      num_heads: heads H, each with a memory; a multiple of the devices that split the sequence.
      head_dim: width K of a query, key and value; None for D / H.
      depth: number of layers of f: 1 for x M, 2 for x + silu(x M1) M2.
      expand: number of hidden units of f, in multiples of K.
      chunk_size: number of tokens C between updates. 1 updates at every token; large chunks are faster.
      short_taps: taps of the short convolutions of q, k and v.
      causal: True; the memory has no bidirectional form.
      packed: whether rows may hold several documents. False promises one per row, at its start.
      segment_alignment: a promise of the packer: documents start at multiples of this number. A multiple of
        `chunk_size`, or one document per row, saves a third of the work.
    """

    dim: int
    num_heads: int = 4
    head_dim: int | None = None
    depth: int = 2
    expand: int = 4
    chunk_size: int = 64
    short_taps: int = 4
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "num_heads", "head_dim", "expand", "chunk_size", "short_taps", "segment_alignment")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "depth", least=1, most=2)
        check_causal(self)
        check_divides(self)

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        width = self.head_dim or self.dim // self.num_heads
        return HeadShape(self.num_heads, self.num_heads, width, width, self.short_taps)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Shapes of a memory's weights."""
        width = self.shape.keys
        hidden = self.expand * width
        return ((width, width),) if self.depth == 1 else ((width, hidden), (hidden, width))

    @property
    def aligned(self) -> bool:
        """True if chunks lie on the grid of training rows."""
        return not self.packed or self.segment_alignment % self.chunk_size == 0

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "NeuralMemory":
        """Build the module.

        Parameters are fp32, products in `dtype`, gates, norms and memories in fp32.
        """
        return NeuralMemory(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "NeuralMemoryState":
        """Return no memory yet.

        The first token brings the learned memory that every document starts from.
        """
        return empty_state(self, batch_size, dtype, wide=2)


@flax.struct.dataclass
class MemoryCarry:
    """The memory and open chunk that a head carries from token to token.

    Attributes:
      memory: M and S behind the document's last whole chunk.
      opened: k, v, theta, eta and alpha of the tokens since then. Sums of eta and alpha would do, and save 8 bytes of
        the 4 K + 12 of a token in bf16; kept by token, all five are laid in front of the next call's alike.
      begun: whether there was a token: before the first M is not known without the parameters.
    """

    memory: MemoryState
    opened: OpenChunk
    begun: Bool[Array, "B H"]

    __repr__ = show


@flax.struct.dataclass
class NeuralMemoryState:
    """State of a neural memory, of constant size.

    Attributes:
      clock: where each row stands.
      short: the last taps - 1 inputs of the convolutions of q, k and v.
      carry: memories and open chunks.
    """

    clock: Clock
    short: tuple[Float[Array, "B _ S"], ...]
    carry: MemoryCarry

    __repr__ = show


@flax.struct.dataclass
class MemoryStreams:
    """The streams of tokens for a memory, all by head."""

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H K"]
    theta: Float[Array, "B T H"]
    eta: Float[Array, "B T H"]
    alpha: Float[Array, "B T H"]

    @property
    def written(self) -> tuple[Array, ...]:
        """The streams that a write takes."""
        return self.k, self.v, self.theta, self.eta, self.alpha


def empty_state(config: Any, rows: int, dtype: Any, *, wide: int) -> NeuralMemoryState:
    """Return the state before the first token.

    An open chunk holds `wide` streams [B, H, C, K] and the gates.
    """
    shape = config.shape
    zeros = lambda *sizes: jnp.zeros((rows, shape.heads, *sizes), jnp.float32)  # noqa: E731
    weights = tuple(zeros(*size) for size in config.matrices)
    streams = (zeros(config.chunk_size, shape.keys).astype(dtype),) * wide
    gates = (zeros(config.chunk_size),) * len(GATES)
    content, count = zeros(config.chunk_size).astype(bool), zeros().astype(jnp.int32)
    opened = OpenChunk((*streams, *gates), content, count)
    carry = MemoryCarry(MemoryState(weights, weights), opened, count.astype(bool))
    return NeuralMemoryState(start_clock(rows), shape.no_inputs(rows, dtype), carry)


class NeuralMemory(nn.Module):
    """y = (RMSNorm(f_M(q)) * silu(x W_g)) W_out; q, k and v have length 1, theta, eta, alpha = sigmoid(x W + b)."""

    config: NeuralMemoryConfig
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
        """Return the output and the next state (None in training); positions play no part."""
        check_kind(NeuralMemoryState, state)
        config, clock, short, carry = self.config, None, None, None
        if state is not None:
            check_memory(config, state.carry)
            clock, short, carry = state.clock, state.short, state.carry
        options: Any = {"width": config.dim, "alignment": config.segment_alignment}
        options["alone"] = not config.packed
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, **options)
        (q, k, v), short = Streams(config.shape, self.dtype, name="streams")(rows, short)
        gates = memory_gates(config.num_heads, self.dtype)(rows.x)
        core = MemoryCore(
            start_memory(self, config),
            config.chunk_size,
            config.aligned,
            traced=state is None and self.is_mutable_collection("metrics"),
        )
        streams = MemoryStreams(unit(q), unit(k), unit(v), *gates)
        keep_core(self, core, streams)
        (o, trace), after = rows.run(core, streams, carry)
        if trace is not None:
            sow_trace(self, rows, trace, gates[2])
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, carry=after)


def memory_gates(heads: int, dtype: Any) -> Any:
    """Return a function from x to theta, eta and alpha; call it inside a module."""

    def start(key: Array, shape: tuple[int, ...], kind: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(list(GATES.values()), kind), shape)

    sizes, names = {"h": heads, "g": len(GATES)}, ("embed", "heads", None)
    layer = Linear("btd,dhg->bthg", sizes, names, dtype, bias=start, accumulate=jnp.float32, name="gates")
    return lambda x: tuple(jnp.moveaxis(jax.nn.sigmoid(layer(x).astype(jnp.float32)), 3, 0))


def start_memory(module: nn.Module, config: Any) -> tuple[Float[Array, "H _ _"], ...]:
    """Return the learned M that every document starts from.

    The second of two matrices is zero at first. The first is drawn at variance 1 / K. With four hidden units to a
    channel silu(k M1) has a length near 1 then, for which a step of size 1 is right.
    """
    names, found = ("heads", "head_dim", None), []
    for i, size in enumerate(config.matrices):
        init = nn.initializers.zeros if i else per_block(nn.initializers.lecun_normal(), 1)
        shape = (config.num_heads, *size)
        found.append(module.param(f"memory_{i + 1}", named(init, *names), shape, jnp.float32))
    return tuple(found)


def sow_trace(module: nn.Module, rows: Rows, trace: Trace, alpha: Float[Array, "B T H"]) -> None:
    """Sow means of the surprise, of the lengths of M and S, and of alpha.

    Means are over writes, those of alpha over tokens.
    """
    writes = jnp.maximum(jnp.sum(trace.weights > 0, dtype=jnp.float32), 1)
    for name, x in (("surprise", trace.surprise), ("norm", trace.weights), ("momentum", trace.momentum)):
        sow_metric(module, f"memory_{name}", jnp.sum(x) / writes)
    content = jnp.ones(alpha.shape[:2], bool) if rows.content is None else rows.content
    tokens = jnp.maximum(jnp.sum(content, dtype=jnp.float32), 1) * alpha.shape[2]
    sow_metric(module, "memory_alpha", jnp.sum(jnp.where(content[..., None], alpha, 0)) / tokens)


@flax.struct.dataclass
class MemoryCore:
    """Core of a memory; streams are `MemoryStreams`, outputs what tokens read and a `Trace` or None.

    Attributes:
      weights: M before a document.
      chunk_size: C.
      aligned: in training documents begin at multiples of C.
      traced: return a trace.
    """

    weights: tuple[Float[Array, "H _ _"], ...]
    chunk_size: int = flax.struct.field(pytree_node=False)
    aligned: bool = flax.struct.field(pytree_node=False)
    traced: bool = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("weights",))

    def zero(self, streams: MemoryStreams) -> MemoryCarry:
        """Return the memory before a document, and no tokens."""
        opened = no_tokens(streams.written, self.chunk_size)
        return MemoryCarry(start_state(self.weights, opened.count), opened, opened.count == 0)

    def run(
        self, streams: MemoryStreams, marks: Marks, carry: MemoryCarry | None
    ) -> tuple[tuple[Float[Array, "B T H K"], Trace | None], MemoryCarry | None]:
        """Return what tokens read; with a carry also what is carried behind the stretch."""
        if carry is None:
            found: Any = self._op(streams, marks.segment_ids, aligned=self.aligned, output_trace=self.traced)
            return (found if self.traced else (found, None)), None
        carry = self._begun(carry, marks)
        if streams.q.shape[1] == 1:
            return self._one(streams, marks, carry)
        nothing = jnp.zeros_like(carry.opened.streams[0])
        opened = dataclasses.replace(carry.opened, streams=(nothing, *carry.opened.streams))
        laid = lay_out(opened, (streams.q, *streams.written), marks)
        options = {"initial_state": carry.memory, "output_final_state": True}
        y, memory = self._op(MemoryStreams(*laid.streams), laid.segment_ids, aligned=laid.whole, **options)
        rest = left_open(laid, self.chunk_size)
        rest = dataclasses.replace(rest, streams=rest.streams[1:])
        return (take_back(y, laid, streams.q.shape[1]), None), MemoryCarry(memory, rest, carry.begun)

    def _op(self, streams: MemoryStreams, ids: Any, *, aligned: bool, **options: Any) -> Any:
        return neural_memory(
            streams.q,
            streams.k,
            streams.v,
            streams.theta,
            streams.eta,
            streams.alpha,
            self.weights,
            segment_ids=ids,
            segment_alignment=self.chunk_size if aligned else 1,
            chunk_size=self.chunk_size,
            **options,
        )

    def _begun(self, carry: MemoryCarry, marks: Marks) -> MemoryCarry:
        """Start M anew in rows whose first token this is.

        Where there are segment ids the driver does this.
        """
        if marks.segment_ids is not None:
            return carry

        # Cast outside of the branch: the transpose of the cast sums over devices, which may take different branches.
        weights = vary_alike(*self.weights, carry.opened.count)[:-1]

        def begin() -> MemoryState:
            return select_heads(carry.begun, carry.memory, start_state(weights, carry.opened.count))

        # Copy and make no memory where every row has begun.
        memory = jax.lax.cond(jnp.all(carry.begun), lambda: carry.memory, begin)
        return MemoryCarry(memory, carry.opened, jnp.ones_like(carry.begun))

    def _one(self, streams: MemoryStreams, marks: Marks, carry: MemoryCarry) -> Any:
        """Take one token: a read, and a write where its chunk is full."""
        kind = streams.q.dtype
        y = read_memory(carry.memory.weights, jnp.moveaxis(streams.q, 1, 2), kind).astype(kind)
        # Read before the write: XLA would copy M at each token to keep what is still to be read
        y, before = jax.lax.optimization_barrier((y, carry.memory))
        opened, full = append(carry.opened, streams.written, marks)
        chunk = Chunk(
            *(x.astype(s.dtype) for x, s in zip(opened.streams, streams.written, strict=True)),
            content=opened.content[:, 0],
        )

        def write() -> MemoryState:
            after, _ = write_memory(before, chunk, kind)
            return select_heads(jnp.broadcast_to(full[:, None], carry.begun.shape), after, before)

        memory = jax.lax.cond(jnp.any(full), write, lambda: before)
        count = jnp.where(full[:, None], 0, opened.count)
        left = dataclasses.replace(opened, count=count)
        return (jnp.moveaxis(y, 2, 1), None), MemoryCarry(memory, left, carry.begun)


def start_state(weights: tuple[Array, ...], like: Int[Array, "B H"]) -> MemoryState:
    """Return M before a document and S = 0, for the rows of `like`.

    They vary over the devices of `like`.
    """
    zeros = jnp.zeros_like(like, weights[0].dtype)[..., None, None]
    state = tuple(zeros + m[None] for m in weights)
    return MemoryState(state, tuple(jnp.zeros_like(m) for m in state))


def select_heads(mask: Bool[Array, "B H"], new: Any, old: Any) -> Any:
    """Return memories [B, H, ...] of `new` where the mask says so, else of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(mask[..., None, None], a, b), new, old)


def check_memory(config: Any, carry: MemoryCarry) -> None:
    """Raise ValueError for a state that another config made."""
    expected = [
        *((config.num_heads, *size) for size in config.matrices),
        (config.num_heads, config.chunk_size),
    ]
    found = [x.shape[1:] for x in (*carry.memory.weights, carry.opened.content)]
    if found != expected:
        raise ValueError(
            f"the state holds memories and open chunks of shapes {found}, this config's are {expected}: make it by "
            "init_state of the same config"
        )
