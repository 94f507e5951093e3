"""Edges: every `interval` tokens of a document the slots of a head move by a cell and attend to each other.

Edges make the slots a nonlinear function of the chunk before, so stretches cannot be joined. Chunks are run one after
another. Where a mesh splits the sequence, heads are scattered over its devices.
"""

from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.base import select_rows
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.slots.state_slots import (
    Slots,
    SlotStreams,
    empty_slots,
    largest,
    only_allowed,
    routed,
    write_and_read,
)
from pallas_kernels.neural_memory import window_size

Cell = Literal["linear", "gru", "lstm"]
GATES: dict[Cell, int] = {"linear": 0, "gru": 3, "lstm": 4}
"""Matrices of a cell, of its input and of its state each."""


@flax.struct.dataclass
class Engine:
    """The slots and clock that a head carries from token to token.

    Attributes:
      slots: as of the last token.
      edge: key and value of each slot as of the document's last edge, zero before the first.
      cell: c of an LSTM, else None.
      time: tokens and holes of the document so far.
    """

    slots: Slots
    edge: Float[Array, "B H S M"]
    cell: Float[Array, "B H S M"] | None
    time: Int[Array, "B H"]


@flax.struct.dataclass
class EdgeStreams:
    """The streams of tokens whose routes look at the states.

    Attributes:
      q, k, v, mask: as in `SlotStreams`.
      log_gate: what a slot keeps of itself to which the whole token is routed.
      logits: the token's share in its routes.
      query: what is compared with the keys of the slots as of the last edge.
      chosen: slots that the token may write to; None for those that its routes choose.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_gate: Float[Array, "B T H"]
    logits: Float[Array, "B T H S"]
    query: Float[Array, "B T H K"]
    mask: Float[Array, "B T H S"] | None = None
    chosen: Int[Array, "B T H k"] | None = None


def move(
    cell: Cell | None,
    weights: dict[str, Array],
    s: Float[Array, "B H S M"],
    h: Float[Array, "B H S M"],
    c: Any,
) -> tuple[Float[Array, "B H S M"], Float[Array, "B H S M"] | None]:
    """Move states over an edge; returns them and c of an LSTM.

    The cell's inputs are the slots s, and its state is h of the last edge. "linear" is h' = (1 - z) s + z h with a z in
    0..1 for each channel. "gru" and "lstm" are as in `jaxblt.mixers.cells.cells`, with a matrix per head that its slots
    share.
    """
    if cell is None:
        return s, None
    if cell == "linear":
        z = jax.nn.sigmoid(weights["bias"])[None, :, None]
        return (1 - z) * s + z * h, None
    of_input, of_state = (_gated(x, weights[name]) for x, name in ((s, "input"), (h, "recurrent")))
    bias = [b[None, :, None] for b in jnp.moveaxis(weights["bias"], 1, 0)]
    if cell == "gru":
        r, z = (jax.nn.sigmoid(of_input[i] + of_state[i] + bias[i]) for i in range(2))
        n = jnp.tanh(of_input[2] + bias[2] + r * of_state[2])
        return (1 - z) * n + z * h, None
    write, keep, new, show = (a + b + d for a, b, d in zip(of_input, of_state, bias, strict=True))
    c = jax.nn.sigmoid(keep) * c + jax.nn.sigmoid(write) * jnp.tanh(new)
    return jax.nn.sigmoid(show) * jnp.tanh(c), c


def communicate(weights: dict[str, Array], s: Float[Array, "B H S M"]) -> Float[Array, "B H S M"]:
    """Return (1 - b) s + b tanh(attention(s)), with b in 0..1 for each channel.

    One attention head looks over a head's slots. No entry grows beyond the larger of 1 and what it was, however many
    edges there are. The order of slots is of no account: permuted slots give permuted results.
    """
    q, k, v = _gated(s, weights["attention"])
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bhsm,bhzm->bhsz", q, k, precision=highest) * s.shape[-1] ** -0.5
    found = jnp.einsum("bhsz,bhzm->bhsm", jax.nn.softmax(scores, -1), v, precision=highest)
    b = jax.nn.sigmoid(weights["share"])[None, :, None]
    return (1 - b) * s + b * jnp.tanh(found)


def _gated(x: Float[Array, "B H S M"], weights: Float[Array, "H G M M"]) -> list[Float[Array, "B H S M"]]:
    product = jnp.einsum("bhsm,hgmn->gbhsn", x, weights, precision=jax.lax.Precision.HIGHEST)
    return list(product)


@flax.struct.dataclass
class EdgeCore:
    """Core of slots that move at edges, in fp32. Streams are `SlotStreams`, or `EdgeStreams` if routes see the states.

    Tokens between two edges are taken at once by the op. The edge comes before its token: what a document's tokens
    i interval ... (i + 1) interval - 1 read was moved i times.

    Attributes:
      bias: of the read scores.
      pace: factor of each slot's log gate.
      cell_weights, attention_weights: of `move` and `communicate`; the latter None for slots that do not attend.
      aligned: in training documents begin at multiples of `interval`, so that no window has an edge inside.
    """

    bias: Float[Array, "H S"]
    pace: Float[Array, "S"]
    cell_weights: dict[str, Array]
    attention_weights: dict[str, Array] | None
    cell: Cell | None = flax.struct.field(pytree_node=False)
    interval: int = flax.struct.field(pytree_node=False)
    chunk_size: int = flax.struct.field(pytree_node=False)
    aligned: bool = flax.struct.field(pytree_node=False)
    top_k: int | None = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(
        pytree_node=False, default=("bias", "cell_weights", "attention_weights")
    )

    def zero(self, streams: Any) -> Engine:
        """Return empty slots at time 0."""
        slots = empty_slots(streams, self.bias.shape[1])
        edge = jnp.zeros_like(_states(slots))
        cell = edge if self.cell == "lstm" else None
        return Engine(slots, edge, cell, jnp.zeros_like(streams.v[:, 0, :, 0], jnp.int32))

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (streams.q.shape[2],)

    def run(self, streams: Any, marks: Marks, carry: Engine | None) -> tuple[Any, Engine]:
        """Return what tokens read, where, their routes, and the engine behind the stretch.

        Routes are None if the streams hold them.
        """
        start = self.zero(streams) if carry is None else carry
        batch, length = streams.q.shape[:2]
        ids = jnp.ones((batch, length), jnp.int32) if marks.segment_ids is None else marks.segment_ids
        new = jnp.zeros(ids.shape, bool) if marks.new is None else marks.new
        time = _times(new, start.time[:, 0])
        edge = (ids != 0) & (time > 0) & (time % self.interval == 0)
        # Use windows of `interval` tokens: none holds two edges, as a document has its first after as many tokens.
        width = window_size(self.interval, length)
        known = carry is None and (marks.segment_ids is None or self.aligned)
        halves = 1 if width == 1 or known else 2
        windows = jax.tree.map(lambda x: _windows(x, width), (streams, ids, new, edge))

        def step(engine: Engine, window: Any) -> tuple[Engine, Any]:
            return self._window(engine, window, halves)

        after, found = jax.lax.scan(step, start, windows)
        found = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :length], found
        )
        ended = jnp.max(jnp.where(ids != 0, jnp.arange(1, length + 1)[None], 0), 1)
        last = jnp.take_along_axis(time, jnp.maximum(ended - 1, 0)[:, None], 1) + 1
        total = jnp.where((ended > 0)[:, None], last, start.time)
        return found, Engine(after.slots, after.edge, after.cell, total.astype(jnp.int32))

    def _window(self, engine: Engine, window: Any, halves: int) -> tuple[Engine, Any]:
        """Take tokens with at most one edge: those before it, the edge, and those from it on."""
        streams, ids, new, edge = window
        moves = jnp.any(edge, 1)
        if halves == 1:  # the edge, if there is one, comes first
            return self._tokens(self._moved(engine, moves), streams, ids, new)
        place, width = jnp.arange(ids.shape[1])[None], ids.shape[1]
        at = jnp.where(moves, jnp.argmax(edge, 1), width)[:, None]

        def half(engine: Engine, second: Bool[Array, ""]) -> tuple[Engine, Any]:
            inside = (place >= at) == second
            engine = self._moved(engine, moves & second)
            return self._tokens(engine, streams, jnp.where(inside, ids, 0), new & inside)

        engine, found = jax.lax.scan(half, engine, jnp.asarray([False, True]))
        late = place >= at

        def chosen(x: Array) -> Array:
            return jnp.where(late.reshape(*late.shape, *(1,) * (x.ndim - 3)), x[1], x[0])

        return engine, jax.tree.map(chosen, found)

    def _moved(self, engine: Engine, moves: Bool[Array, "B"]) -> Engine:
        """Move the engine over an edge, in the rows that have one."""
        s = _states(engine.slots)
        h, c = move(self.cell, self.cell_weights, s, engine.edge, engine.cell)
        if self.attention_weights is not None:
            h = communicate(self.attention_weights, h)
        width = engine.slots.keys.shape[2]
        slots = Slots(keys=jnp.swapaxes(h[..., :width], 2, 3), values=h[..., width:])
        return select_rows(moves, Engine(slots, h, c, engine.time), engine)

    def _tokens(
        self, engine: Engine, streams: Any, ids: Int[Array, "B W"], new: Bool[Array, "B W"]
    ) -> tuple[Engine, Any]:
        """Take tokens without an edge among them; documents may begin at any."""
        first = jnp.argmax(ids != 0, 1)[:, None]
        begins = jnp.take_along_axis(new, first, 1)[:, 0]
        slots = select_rows(begins, empty_slots(streams, self.bias.shape[1]), engine.slots)
        routes = None
        if isinstance(streams, EdgeStreams):
            streams, routes = self._routed(streams, engine.edge, jnp.cumsum(new, 1, dtype=jnp.int32) == 0)
        (o, reads), slots = write_and_read(streams, self.bias, ids, slots, self.chunk_size)
        assert slots is not None
        blank = jax.tree.map(jnp.zeros_like, (engine.edge, engine.cell))
        edge, cell = select_rows(jnp.any(new, 1), blank, (engine.edge, engine.cell))
        return Engine(slots, edge, cell, engine.time), (o, reads, routes)

    def _routed(
        self, streams: EdgeStreams, edge: Float[Array, "B H S M"], continues: Bool[Array, "B W"]
    ) -> tuple[SlotStreams, Float[Array, "B W H S"]]:
        """Add gates to streams, by routes that look at the states of the document's last edge."""
        keys = edge[..., : streams.query.shape[-1]]
        query = streams.query.astype(jnp.float32) * keys.shape[-1] ** -0.5
        seen = jnp.einsum("bwhk,bhsk->bwhs", query, keys, precision=jax.lax.Precision.HIGHEST)
        logits = streams.logits + jnp.where(continues[:, :, None, None], seen, 0)
        logits = only_allowed(logits, streams.mask)
        chosen = streams.chosen
        if chosen is None and self.top_k is not None:
            chosen = largest(logits, self.top_k)
        routes = routed(logits, chosen)
        gate = slot_gates(routes, streams.log_gate, self.pace)
        return SlotStreams(streams.q, streams.k, streams.v, gate, streams.mask), routes


def slot_gates(
    routes: Float[Array, "B T H S"], log_gate: Float[Array, "B T H"], pace: Float[Array, "S"]
) -> Float[Array, "B T H S"]:
    """Return route_ts log_gate_t, times each slot's pace."""
    return routes * log_gate[..., None] * pace[None, None, None]


def _states(slots: Slots) -> Float[Array, "B H S M"]:
    """Return key and value of each slot, side by side."""
    return jnp.concatenate([jnp.swapaxes(slots.keys, 2, 3), slots.values], -1)


def _times(new: Bool[Array, "B T"], entered: Int[Array, "B"]) -> Int[Array, "B T"]:
    """Count tokens and holes of its document before each position.

    The first document has `entered` of them already.
    """
    index = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    start = jax.lax.cummax(jnp.where(new, index, -1), axis=1)
    return jnp.where(start >= 0, index - start, index + entered[:, None])


def _windows(x: Array, width: int) -> Array:
    """Reshape [B, T, ...] to [T / width, B, width, ...], filled up with zeros."""
    count = -(-x.shape[1] // width)
    x = jnp.pad(x, ((0, 0), (0, count * width - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], count, width, *x.shape[2:]), 1, 0)
