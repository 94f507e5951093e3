"""A state engine: tokens are routed into a fixed number of states and read from them, in linear time.

`state_slots` holds how slots are written and read, `state_edges` how they move every so many tokens, `state_count` how
many of them a token may use.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import start_clock
from jaxblt.mixers.driver.choices import given_choice, held
from jaxblt.mixers.driver.counted import Counted
from jaxblt.mixers.driver.recording import keep_tables
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.mixers.driver.steps import per_block
from jaxblt.mixers.linear.matrix_state import HeadShape, Readout, Streams, check_forward
from jaxblt.mixers.slots.chosen_slots import ChosenCore
from jaxblt.mixers.slots.engine_state import ROUTE_SPREAD, StateEngineState
from jaxblt.mixers.slots.experimental.state_manager import (
    StateManager,
    closed_slots,
    report_importance,
)
from jaxblt.mixers.slots.state_count import LEAST, SlotCount, start_count
from jaxblt.mixers.slots.state_edges import GATES, Cell, EdgeCore, EdgeStreams, Engine, slot_gates
from jaxblt.mixers.slots.state_slots import SlotCore, Slots, SlotStreams, largest, only_allowed, routed
from jaxblt.side_outputs import sow_loss, sow_metric, sow_price
from jaxblt.validation import check_bounds, check_fields, check_read

SLOTS = 16
SLOWER = 4.0
"""A level's slots forget this many times slower than those of the level below."""
CHOICE = "routes"
"""Name of the choice of slots, see `jaxblt.mixers.driver.choices`."""
SMALL_SHARE = -2.0
"""The gates of edges at the start, before the sigmoid: an edge changes slots by an eighth at first."""


@dataclasses.dataclass(frozen=True)
class StateEngineConfig:
    """slot_s <- (1 - w_ts) slot_s + w_ts [k_t, v_t], w_ts = 1 - exp(route_ts g_t); read by softmax over slots.

    g_t <= 0 is a gate of each head, -1 on average at first. Routes are a softmax over the S slots of a head, so a token
    writes as much as one slot takes, whatever S is. They start uneven, or all slots would hold the same; q, k and v
    start as `recall` of `Streams` says. Slots are convex mixtures of zero and of what was routed to them: they do not
    grow with the number of tokens. They begin at zero, and the first 2 S tokens or so of a document fill them; norms
    are flat from there, of outputs from the start.
    Reading is gated slot attention (Zhang et al., 2409.07146, sec. 3).

    With a `cell`, `state_attention` or `state_routes`, slots are also updated at *edges*, every `interval` tokens of a
    document. Chunks then run one after another. If a mesh splits the sequence, each device runs some of the heads.

    Attributes:
      dim: width D.
      num_heads: heads H; with edges a multiple of the devices that split the sequence.
      num_slots: number of slots S per head; None for 16, or for the sum of `levels`.
      levels: number of slots of each level, such as (32, 16, 8); each level forgets 4 times slower than the level
        before. () for one level.
      head_dim: width of a query, key and value; None for D / H.
      top_k_states: number of slots that a token writes to, the likeliest; None for all. All slots are still computed.
      gathered: compute only the slots to which the tokens of a chunk write (`slots.chosen_slots`), for rows of at least
        a chunk. The other slots are read unchanged. This saves products if there are far more slots than `chunk_size`
        times `top_k_states`. Chunks then run one after another.
      cell: how slots move at an edge, from what they were at the edge before; None for not at all.
      interval: tokens from edge to edge.
      full: the gate of token n of a document is S / n times as large, where that is above 1. Slots are running means at
        first, and their norms are flat from 20 tokens on. With False, as in runs of older versions, 128 slots take 250.
      state_attention: at an edge the slots of a head attend to each other.
      state_routes: routes look at the slots as of the last edge, too.
      adaptive_count: a token uses 4 + c (S - 4) slots, where c depends on the document so far (`slots.state_count`).
      manager: closes slots that are hardly read during training (`slots.experimental.state_manager`), or None. Its
        importances are stored in the parameters, so a resumed run has them.
      balance_weight: weight of the loss S sum_s f_s P_s (Switch Transformer, 2101.03961, sec. 2.2). f_s is the share of
        tokens that choose slot s, and P_s its mean route.
      count_weight: weight of the loss mean(c) of each row, which is also weighted by the probability of the row's
        targets (`jaxblt.training.metrics.answered`).
      short_taps: taps of the short convolutions of q, k and v.
      causal: True; the engine has no bidirectional form.
      packed: whether rows may hold several documents. False promises one per row, at its start.
      segment_alignment: a promise of the packer: documents start at multiples of this number. A multiple of `interval`,
        or one document per row, halves the work of edges.
      chunk_size: number of steps that are computed at once, a power of two; the result does not depend on it.
    """

    dim: int
    num_heads: int = 8
    num_slots: int | None = None
    levels: tuple[int, ...] = ()
    head_dim: int | None = None
    top_k_states: int | None = None
    gathered: bool = False
    cell: Cell | None = None
    interval: int = 64
    full: bool = True
    state_attention: bool = False
    state_routes: bool = False
    adaptive_count: bool = False
    manager: StateManager | None = None
    balance_weight: float = 0.01
    count_weight: float = 0.01
    short_taps: int = 4
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "num_heads", "num_slots", "levels", "head_dim", "top_k_states", "interval")
        check_bounds(self, *sizes, "short_taps", "segment_alignment", "chunk_size", least=1)
        check_bounds(self, "balance_weight", "count_weight", least=0)
        edges = "cell, state_attention or state_routes"
        check_read(self, "interval", needed=edges, is_read=self.has_edges)
        check_read(self, "count_weight", needed="adaptive_count", is_read=self.adaptive_count)
        few = self.top_k_states is not None and not self.has_edges
        check_read(self, "gathered", needed="top_k_states and no edges", is_read=few)
        check_forward(self)
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not divide among num_heads = {self.num_heads}: set head_dim"
            )
        if self.levels and self.num_slots not in (None, sum(self.levels)):
            raise ValueError(
                f"levels {self.levels} hold {sum(self.levels)} slots, got num_slots = {self.num_slots}: leave it None"
            )
        check_bounds(self, "top_k_states", most="slots")
        if self.adaptive_count and self.slots <= LEAST:
            raise ValueError(
                f"adaptive_count chooses among {LEAST} slots and more, got {self.slots}: raise num_slots"
            )
        if self.adaptive_count and self.top_k_states is not None and self.top_k_states > LEAST:
            raise ValueError(
                f"top_k_states must be at most {LEAST} with adaptive_count, which may leave as few slots, got "
                f"{self.top_k_states}: lower it, or set adaptive_count=False"
            )

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Add the gates of older runs, whose slots took longer to be full."""
        return {"full": False} | stored

    @property
    def slots(self) -> int:
        """S, of all levels."""
        return self.num_slots or sum(self.levels) or SLOTS

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Slots of each level."""
        return self.levels or (self.slots,)

    @property
    def has_edges(self) -> bool:
        """True if slots do more than tokens make them do, every `interval` tokens."""
        return self.cell is not None or self.state_attention or self.state_routes

    @property
    def interval_of_edges(self) -> int | None:
        """Tokens from edge to edge; None without edges."""
        return self.interval if self.has_edges else None

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        width = self.head_dim or self.dim // self.num_heads
        return HeadShape(self.num_heads, self.num_heads, width, width, self.short_taps)

    @property
    def pace(self) -> np.ndarray:
        """The factor of each slot's log gate: less in upper levels."""
        sizes = self.level_sizes
        return np.repeat(SLOWER ** -np.arange(len(sizes), dtype=np.float32), sizes)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "StateEngine":
        """Build the module.

        Parameters are fp32, products in `dtype`, routes, gates, reads and slots in fp32.
        """
        return StateEngine(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "StateEngineState":
        """Return zero inputs in `dtype`, and empty slots in fp32."""
        shape, count = self.shape, self.slots
        zeros = lambda *sizes: jnp.zeros((batch_size, shape.heads, *sizes), jnp.float32)  # noqa: E731
        slots: Any = Slots(zeros(shape.keys, count), zeros(count, shape.values))
        if self.has_edges:
            edge = zeros(count, shape.keys + shape.values)
            time = jnp.zeros((batch_size, shape.heads), jnp.int32)
            slots = Engine(slots, edge, edge if self.cell == "lstm" else None, time)
        counted = start_count(batch_size) if self.adaptive_count else None
        told: Any = {"levels": self.level_sizes, "cell": self.cell, "interval": self.interval_of_edges}
        short = shape.no_inputs(batch_size, dtype)
        return StateEngineState(start_clock(batch_size), short, slots, counted, **told)


class StateEngine(nn.Module):
    """y = (RMSNorm(o) * silu(x W_g)) W_out, o what a token reads from the slots."""

    config: StateEngineConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: StateEngineState | None = None,
    ) -> tuple[Float[Array, "B T D"], StateEngineState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config, before = self.config, state
        told: Any = {"levels": config.level_sizes, "interval": config.interval_of_edges}
        check_kind(StateEngineState, before, adaptive_count=config.adaptive_count, cell=config.cell, **told)
        clock = None if before is None else before.clock
        options: Any = {"width": config.dim, "alignment": config.segment_alignment}
        options["alone"] = not config.packed
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, **options)
        short, counted = (None, None) if before is None else (before.short, before.counted)
        qkv, short = Streams(config.shape, self.dtype, recall=True, name="streams")(rows, short)
        mask, counted = self._mask(rows, counted, training=before is None)
        closed = closed_slots(self, config.manager, config.num_heads, config.slots)
        streams, routes = self._streams(rows, qkv, mask, closed)
        found, after = rows.run(
            self._core(closed, streams), streams, None if before is None else before.engine
        )
        o, reads, *seen = found
        if config.state_routes and config.top_k_states is not None:
            held(self, CHOICE, largest(seen[0], config.top_k_states))
        if before is None:
            routes = seen[0] if routes is None else routes
            keep_tables(self, "routing", lambda: {"routes": routes, "reads": reads})
            self._report(rows, routes, reads)
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if before is None:
            return y, None
        return y, dataclasses.replace(before, clock=rows.clock, short=short, engine=after, counted=counted)

    def _mask(
        self, rows: Rows, counted: Any, *, training: bool
    ) -> tuple[Float[Array, "B T H S"] | None, Any]:
        """Return each token's share of each slot, and the sums behind the call.

        The share is None unless the count is adaptive.
        """
        config = self.config
        if not config.adaptive_count:
            return None, None
        mask, c, counted = SlotCount(config.slots, self.dtype, name="count")(rows, counted)
        if training:
            sow_price(self, "state_count", config.count_weight * _by_row(rows, c))
            mean = _over_tokens(rows, c[..., None])[0]
            sow_metric(self, "state_count", LEAST + mean * (config.slots - LEAST))
        return jnp.repeat(mask[:, :, None], config.num_heads, 2), counted

    def _streams(
        self,
        rows: Rows,
        qkv: Any,
        mask: Float[Array, "B T H S"] | None,
        closed: Float[Array, "H S"] | None,
    ) -> tuple[SlotStreams | EdgeStreams, Float[Array, "B T H S"] | None]:
        """Return what tokens bring to the slots, and their routes.

        Routes are None if they read the states.
        """
        config, heads, x, (q, k, v) = self.config, self.config.num_heads, rows.x, qkv
        shared: Any = {"dtype": self.dtype, "accumulate": jnp.float32}
        bias, sizes = nn.initializers.zeros, {"h": heads, "s": config.slots}
        spread = nn.initializers.variance_scaling(ROUTE_SPREAD**2, "fan_in", "truncated_normal")
        start: Any = {"bias": bias, "kernel_init": spread}
        logits = Linear("btd,dhs->bths", sizes, ("embed", "heads", None), name="route", **start, **shared)(x)
        one = nn.initializers.constant(math.log(math.e - 1))  # softplus of it is 1
        gate = Linear("btd,dh->bth", {"h": heads}, ("embed", "heads"), bias=one, name="gate", **shared)(x)
        log_gate, logits = -jax.nn.softplus(gate.astype(jnp.float32)), logits.astype(jnp.float32)
        if config.full:
            log_gate = log_gate * jnp.maximum(config.slots / (1 + _places(rows)), 1)[..., None]
        logits = logits if closed is None else logits + closed[None, None]
        if config.state_routes:
            sizes, names = {"h": heads, "k": config.shape.keys}, ("embed", "heads", "head_dim")
            query = Linear("btd,dhk->bthk", sizes, names, self.dtype, name="route_query")(x)
            return EdgeStreams(q, k, v, log_gate, logits, query, mask, given_choice(self, CHOICE)), None
        logits, chosen = only_allowed(logits, mask), None
        if config.top_k_states is not None:
            chosen = held(self, CHOICE, largest(logits, config.top_k_states))
        routes = routed(logits, chosen)
        gates = slot_gates(routes, log_gate, jnp.asarray(config.pace))
        # Leave shorter rows dense: a decoded token spends more on gathering than it saves
        few = config.gathered and x.shape[1] >= config.chunk_size
        return SlotStreams(q, k, v, gates, mask, chosen if few else None), routes

    def _core(
        self, closed: Float[Array, "H S"] | None, streams: SlotStreams | EdgeStreams
    ) -> SlotCore | EdgeCore:
        config, shape = self.config, (self.config.num_heads, self.config.slots)
        bias = self.param("read_bias", named(nn.initializers.zeros, "heads", None), shape, jnp.float32)
        bias = bias if closed is None else bias + closed
        if isinstance(streams, SlotStreams) and not self.config.has_edges:
            core = SlotCore if streams.chosen is None else ChosenCore
            return core(bias, config.chunk_size)
        return EdgeCore(
            bias,
            jnp.asarray(config.pace),
            self._cell(),
            self._attention(),
            cell=config.cell,
            interval=config.interval,
            chunk_size=config.chunk_size,
            aligned=not config.packed or config.segment_alignment % config.interval == 0,
            top_k=config.top_k_states,
        )

    def _cell(self) -> dict[str, Array]:
        cell = self.config.cell
        if cell is None:
            return {}
        if cell == "linear":
            return {"bias": self._per_channel("cell_share")}
        gates, width = GATES[cell], 2 * self.config.shape.keys
        square = per_block(nn.initializers.orthogonal(), 2)
        shape = (self.config.num_heads, gates, width, width)
        zeros = named(nn.initializers.zeros, "heads", None, "head_dim")
        matrices = {
            name: self.param(f"cell_{name}", named(square, "heads", None, "head_dim", None), shape)
            for name in ("input", "recurrent")
        }
        return {**matrices, "bias": self.param("cell_bias", zeros, shape[:3], jnp.float32)}

    def _attention(self) -> dict[str, Array] | None:
        if not self.config.state_attention:
            return None
        width = 2 * self.config.shape.keys
        init = named(per_block(nn.initializers.lecun_normal(), 2), "heads", None, "head_dim", None)
        matrices = self.param("attention", init, (self.config.num_heads, 3, width, width))
        return {"attention": matrices, "share": self._per_channel("attention_share")}

    def _per_channel(self, name: str) -> Float[Array, "H M"]:
        init = named(nn.initializers.constant(SMALL_SHARE), "heads", "head_dim")
        return self.param(name, init, (self.config.num_heads, 2 * self.config.shape.keys), jnp.float32)

    def _report(self, rows: Rows, routes: Float[Array, "B T H S"], reads: Float[Array, "B T H S"]) -> None:
        """Sow the balance loss and the mass that tokens write to and read from each slot."""
        config, count = self.config, self.config.slots
        mass = _over_tokens(rows, routes)
        likeliest = jax.nn.one_hot(jnp.argmax(routes, -1), count, dtype=jnp.float32)
        chosen = (
            likeliest
            if config.top_k_states is None
            else (routes > 0).astype(jnp.float32) / config.top_k_states
        )
        share = jax.lax.stop_gradient(_over_tokens(rows, chosen))
        balance = count * jnp.mean(jnp.sum(share * mass, -1))
        sow_loss(self, "state_balance", config.balance_weight * balance)
        sow_metric(self, "state_balance", balance)
        sow_metric(self, "state_route_mass", jnp.mean(mass, 0))
        read_mass = _over_tokens(rows, jax.lax.stop_gradient(reads))
        sow_metric(self, "state_read_mass", read_mass.reshape(-1))
        report_importance(self, config.manager, read_mass)


def _places(rows: Rows) -> Float[Array, "B T"]:
    """Return tokens and holes of its document before each token."""
    if rows.tokens is not None:
        return rows.tokens.time.astype(jnp.float32)
    found, _ = rows.run(Counted(), jnp.zeros(rows.x.shape[:2], jnp.int32))
    return found.astype(jnp.float32)


def _by_row(rows: Rows, x: Float[Array, "B T"]) -> Float[Array, "B"]:
    """Return the mean over each row's tokens; 0 without any."""
    content = jnp.ones(x.shape) if rows.content is None else rows.content.reshape(x.shape).astype(jnp.float32)
    return jnp.sum(x * content, 1) / jnp.maximum(jnp.sum(content, 1), 1)


def _over_tokens(rows: Rows, x: Float[Array, "B T ..."]) -> Float[Array, "..."]:
    """Return the mean over tokens, without holes and padding."""
    if rows.content is None:
        return jnp.mean(x, (0, 1))
    content = rows.content.reshape(*x.shape[:2], *(1,) * (x.ndim - 2))
    return jnp.sum(jnp.where(content, x, 0), (0, 1)) / jnp.maximum(
        jnp.sum(rows.content, dtype=jnp.float32), 1
    )
