"""Long-term memory in slots: every few tokens are compressed to candidates, which are written to a bank and read."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.choices import COLLECTION, held
from jaxblt.mixers.driver.open_chunk import OpenChunk
from jaxblt.mixers.driver.recording import keep_core
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.driver.steps import check_causal, check_divides, per_block
from jaxblt.mixers.linear.gated_delta_net import unit
from jaxblt.mixers.linear.matrix_state import HeadShape, Readout, Streams
from jaxblt.mixers.slots.experimental.slot_bank import SlotBank, empty_bank
from jaxblt.mixers.slots.experimental.slot_compression import count_latents
from jaxblt.mixers.slots.experimental.slot_core import SlotCarry, SlotCore, SlotStreams, SlotTrace
from jaxblt.show import show
from jaxblt.side_outputs import sow_metric
from jaxblt.validation import check_bounds, check_fields, check_read

OWN_SPAN = 4.0
"""Bias of a latent for the places of the interval that are its own at the start of training: e^4 times the others."""

ADDRESSED = 4
"""Slots that a candidate is written to, unless a config says how many."""


@dataclasses.dataclass(frozen=True)
class SlotMemoryConfig:
    """A bank of S slots per head, written at the end of each interval and read by every token of the next one.

    At the end of an interval of n tokens, with M_i the slots:

        u_t = sigmoid(x_t W_c + b_c) * norm(v_t W_p)                      gate, norm to a mean square of 1
        s_l = sum_t p_lt u_t,  l = 1 ... ceil(ratio n)                    compress, p a softmax by latent queries
        a   = softmax_i(s W_a . M_i / sqrt(M) + balance (1 - usage_i))    address, over the top k slots
        M_i <- M_i + (1 - rate) a_i (s - M_i)                             write

    A vector s_l is a *candidate*. A candidate whose best cosine with any slot is below `novelty` is written to the
    least used slot instead; a free slot takes the whole candidate. Within an interval tokens reach each other only
    through the short convolutions, so put attention over a window of at least `interval` beside the memory.
    `experimental.slot_bank` has the rules, and `experimental.slot_upkeep` the functions for use between calls.

    Attributes:
      dim: width D.
      num_heads: heads H, each with a bank; a multiple of the devices that split the sequence.
      head_dim: width M of a slot; None for D / H.
      slots: number of slots S.
      interval: number of tokens between writes.
      ratio: number of candidates per token, in 0..1.
      adaptive_error: write only as many candidates as are needed to leave at most this share of the tokens' energy (see
        `reconstruction_error`), so that simple intervals take fewer slots; None to write all.
      rate: share of its old value that an addressed slot keeps.
      novelty: cosine below which a candidate counts as new.
      balance: how strongly addresses favour slots that are used little.
      usage_decay: share of its usage that a slot keeps after an interval.
      top_k: number of slots to which a candidate is written if it is not new; other slots do not change. None for 4, or
        for all slots if there are fewer.
      prune_below: free slots with less usage than this after `prune_after` intervals without a write; 0 for never.
      prune_after: number of intervals without a write.
      short_taps: taps of the short convolutions of q, k and v.
      causal: True; the memory has no bidirectional form.
      packed: whether rows may hold several documents. False promises one per row, at its start.
      segment_alignment: a promise of the packer: documents start at multiples of this number. A multiple of `interval`,
        or one document per row, saves two of three reads.
    """

    dim: int
    num_heads: int = 4
    head_dim: int | None = None
    slots: int = 64
    interval: int = 8
    ratio: float = 0.5
    adaptive_error: float | None = None
    rate: float = 0.9
    novelty: float = 0.5
    balance: float = 1.0
    usage_decay: float = 0.9
    top_k: int | None = None
    prune_below: float = 0.0
    prune_after: int = 10
    short_taps: int = 4
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "num_heads", "head_dim", "slots", "interval", "short_taps", "segment_alignment")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "top_k", least=1, most="slots")
        check_bounds(self, "ratio", above=0, most=1, why=": it is the share of an interval's tokens")
        check_bounds(self, "adaptive_error", above=0, below=1, why=": it is a share of the tokens' energy")
        check_bounds(self, "rate", "usage_decay", least=0, below=1, why=": it is the share that is left")
        check_bounds(self, "novelty", least=-1, most=1, why=": it is a cosine")
        check_bounds(self, "balance", "prune_below", least=0)
        check_read(self, "prune_after", needed="prune_below above 0", is_read=self.prune_below > 0)
        check_bounds(self, "prune_after", least=1, why=": intervals, and prune_below=0 frees no slot")
        check_causal(self)
        check_divides(self)

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        width = self.head_dim or self.dim // self.num_heads
        return HeadShape(self.num_heads, self.num_heads, width, width, self.short_taps)

    @property
    def latents(self) -> int:
        """Candidates of an interval, at most."""
        return count_latents(self.ratio, self.interval)[-1]

    @property
    def addressed(self) -> int:
        """Slots that a candidate is written to, at most."""
        return min(ADDRESSED, self.slots) if self.top_k is None else self.top_k

    @property
    def aligned(self) -> bool:
        """True if intervals lie on the grid of training rows."""
        return not self.packed or self.segment_alignment % self.interval == 0

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "SlotMemory":
        """Build the module.

        Parameters are fp32, products in `dtype`, gates, softmax and slots in fp32.
        """
        return SlotMemory(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "SlotMemoryState":
        """Return free slots, and no tokens."""
        shape, sizes = self.shape, (batch_size, self.num_heads)
        streams = (jnp.zeros((*sizes, self.interval, shape.keys), dtype),) * 3
        opened = OpenChunk(streams, jnp.zeros((*sizes, self.interval), bool), jnp.zeros(sizes, jnp.int32))
        bank = empty_bank(jnp.zeros(sizes), self.slots, shape.keys)
        short = shape.no_inputs(batch_size, dtype)
        return SlotMemoryState(start_clock(batch_size), short, SlotCarry(bank, opened))


@flax.struct.dataclass
class SlotMemoryState:
    """State of a slot memory, of constant size.

    Attributes:
      clock: where each row stands.
      short: the last taps - 1 inputs of the convolutions of q, k and v.
      carry: banks, and the tokens of the open interval.
    """

    clock: Clock
    short: tuple[Float[Array, "*L B _ S"], ...]
    carry: SlotCarry

    __repr__ = show

    @property
    def bank(self) -> SlotBank:
        """The slots as of each row's last whole interval."""
        return self.carry.bank


class SlotMemory(nn.Module):
    """y = (RMSNorm(o) * silu(x W_g)) W_out, o what a token's query reads from the slots (see `SlotMemoryConfig`)."""

    config: SlotMemoryConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: SlotMemoryState | None = None,
    ) -> tuple[Float[Array, "B T D"], SlotMemoryState | None]:
        """Return the output and the next state (None in training); positions play no part.

        Raises:
          ValueError: the state is of another config.
        """
        check_kind(SlotMemoryState, state)
        config, clock, short, carry = self.config, None, None, None
        if state is not None:
            check_bank(config, state.carry)
            clock, short, carry = state.clock, state.short, state.carry
        options: Any = {"width": config.dim, "alignment": config.segment_alignment}
        options["alone"] = not config.packed
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, **options)
        (q, k, v), short = Streams(config.shape, self.dtype, name="streams")(rows, short)
        streams = SlotStreams(q, k, self._contents(rows.x, v), self._chosen(state))
        core = self._core(state)
        keep_core(self, core, streams)
        (o, side), after = rows.run(core, streams, carry)
        if side.trace is not None:
            sow_trace(self, side.trace)
        if side.chosen is not None:
            held(self, "slots", side.chosen)
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, carry=after)

    def _contents(self, x: Float[Array, "B T D"], v: Float[Array, "B T H M"]) -> Float[Array, "B T H M"]:
        """Return u, zero at holes as v is."""
        shape, zeros = self.config.shape, nn.initializers.zeros
        sizes, names = {"h": shape.heads, "m": shape.keys}, ("embed", "heads", "head_dim")
        logits = Linear("btd,dhm->bthm", sizes, names, self.dtype, bias=zeros, name="gate")(x)
        # Norm what is written: queries meet slots of one scale then, whatever x is.
        raw = jnp.einsum("bthm,hmn->bthn", v, self._square("project", self.dtype))
        return jax.nn.sigmoid(logits) * unit(raw) * math.sqrt(shape.keys)

    def _core(self, state: SlotMemoryState | None) -> SlotCore:
        config, heads, width = self.config, self.config.num_heads, self.config.shape.keys
        normal = named(nn.initializers.normal(1.0), "heads", None, "head_dim")
        places = named(_own_spans, "heads", None, None)
        training = state is None
        return SlotCore(
            latents=self.param("latents", normal, (heads, config.latents, width), jnp.float32),
            places=self.param("places", places, (heads, config.latents, config.interval), jnp.float32),
            address=self._square("address", jnp.float32),
            sink=self.param("sink", normal, (heads, 2, width), jnp.float32),
            config=config,
            traced=training and self.is_mutable_collection("metrics"),
            telling=training and self.is_mutable_collection(COLLECTION),
        )

    def _chosen(self, state: SlotMemoryState | None) -> Any:
        """Return the slots that candidates of intervals are written to, where a check fixes them."""
        there = state is None and self.has_variable(COLLECTION, "slots")
        return self.get_variable(COLLECTION, "slots") if there else None

    def _square(self, name: str, dtype: Any) -> Float[Array, "H M M"]:
        heads, width = self.config.num_heads, self.config.shape.keys
        init = named(per_block(nn.initializers.lecun_normal(), 1), "heads", "head_dim", None)
        return self.param(name, init, (heads, width, width), jnp.float32).astype(dtype)


def _own_spans(key: Array, shape: tuple[int, int, int], dtype: Any) -> Float[Array, "H L C"]:
    """Start latent l at the l-th of L equal spans of the interval."""
    _, latents, places = shape
    own = (jnp.arange(places) * latents // places)[None] == jnp.arange(latents)[:, None]
    return jnp.broadcast_to(OWN_SPAN * own[None].astype(dtype), shape)


def sow_trace(module: nn.Module, trace: SlotTrace) -> None:
    """Sow means over writes: the share of used slots, and what compression kept and lost."""
    writes = jnp.maximum(jnp.sum(trace.writes), 1)
    for name in ("utilisation", "latents", "error"):
        sow_metric(module, f"slot_{name}", jnp.sum(getattr(trace, name)) / writes)


def check_bank(config: SlotMemoryConfig, carry: SlotCarry) -> None:
    """Raise ValueError for a state that another config made."""
    expected = [(config.num_heads, config.slots, config.shape.keys), (config.num_heads, config.interval)]
    found = [carry.bank.slots.shape[1:], carry.opened.content.shape[1:]]
    if found != expected:
        raise ValueError(
            f"the state holds slots and an open interval of shapes {found}, this config's are {expected}: make it by "
            "init_state of the same config"
        )
