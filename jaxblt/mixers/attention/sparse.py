"""Sparse attention whose blocks each token chooses by content: pooled blocks, chosen blocks and a window, gated."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, linears
from jaxblt.mixers.attention.branches import Branches, Stream, attend_cached, attend_tokens, kept_share
from jaxblt.mixers.attention.kv_cache import AttentionState, init_attention_state, meet
from jaxblt.mixers.attention.pooled import Sums
from jaxblt.mixers.attention.rotary import turn
from jaxblt.mixers.driver.base import Clock
from jaxblt.mixers.driver.choices import given_choice, held
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.parallel.attention.by_time import document_times, row_times
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence
from jaxblt.show import show
from jaxblt.side_outputs import sow_loss, sow_metric
from jaxblt.validation import check_bounds, check_fields

CHOICE = "blocks"
"""Name of the chosen lists among a mixer's hard choices."""


@dataclasses.dataclass(frozen=True)
class SparseAttentionConfig:
    """Native sparse attention (Yuan et al., 2502.11089); its three branches share keys and values.

    The branches attend to the means of blocks, to chosen blocks, and to a window.

    Attributes:
      dim: width D.
      num_heads: query heads H.
      num_kv_heads: key and value heads G, a divisor of H; None for H. Query heads of a group choose the same blocks.
      head_dim: width K of a head; None for D / H.
      causal: whether a token sees only earlier tokens, and chooses among complete blocks. Otherwise all tokens of a
        block choose together, among the blocks of their document.
      block: number of tokens in a block, counted from the start of the document.
      top_k: number of blocks that a token chooses; all of them if there are fewer.
      window: number of steps that a token always sees, its own included (on either side if not causal). It is at least
        a block, so that no token is out of reach between window and complete blocks.
      rope_theta: base of the rotary frequencies.
      predictor: hidden width P of two networks that compute the queries and keys which choose blocks, or None to choose
        by the means of blocks. The networks start close to that choice. Their own loss trains them, and nothing else,
        to give each block its share of dense attention. Without them little teaches a token to choose a distant block.
    """

    dim: int
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    block: int = 64
    top_k: int = 16
    window: int = 512
    rope_theta: float = 10_000.0
    predictor: int | None = 32

    def __post_init__(self) -> None:
        check_fields(self)
        names = ("dim", "num_heads", "num_kv_heads", "head_dim", "block", "top_k", "window", "predictor")
        check_bounds(self, *names, least=1)
        if self.window < self.block:
            raise ValueError(
                f"SparseAttentionConfig.window must be at least block = {self.block}, got {self.window}: only the "
                "window shows a token its own block"
            )
        check_bounds(self, "rope_theta", above=0)
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not divide among num_heads = {self.num_heads}: set head_dim"
            )
        if self.num_heads % self.groups:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.groups}")
        if self.width % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels: head_dim must be even, got {self.width}"
            )

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Keep models from before predictors as they are."""
        return {"predictor": None, **stored}

    @property
    def gathers_keys(self) -> bool:
        """Devices that split a row gather its keys and values: chosen blocks lie anywhere in it."""
        return True

    @property
    def groups(self) -> int:
        """Key and value heads G."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Width K of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def branches(self) -> Branches:
        """Sizes of the three branches."""
        return Branches(self.block, self.top_k, self.window, self.causal)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "SparseAttention":
        """Return the module; parameters are fp32, computation in `dtype`, softmax, pooling and gates in fp32."""
        return SparseAttention(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "SparseState":
        """Return an empty cache of `capacity` slots, rounded up to an even number, and of their blocks' sums."""
        sizes = {"num_kv_heads": self.groups, "head_dim": self.width}
        cache = init_attention_state(batch_size, capacity=capacity, window=None, dtype=dtype, **sizes)
        shape = (batch_size, -(-cache.times.shape[1] // self.block))
        zeros = lambda *more: jnp.zeros((*shape, *more), jnp.float32)  # noqa: E731
        k = v = zeros(self.groups, self.width)
        p = None if self.predictor is None else k
        return SparseState(cache, Sums(k, v, p, zeros()), capacity, self.block)


@flax.struct.dataclass
class SparseState:
    """Keys and values of each row's document, and their sums by block.

    Attributes:
      cache: keys and values, by time.
      sums: over the tokens of each block of the document so far.
      capacity: the most tokens of a document.
      block: tokens in a block.
    """

    cache: AttentionState
    sums: Sums
    capacity: int = flax.struct.field(pytree_node=False)
    block: int = flax.struct.field(pytree_node=False)

    __repr__ = show

    @property
    def clock(self) -> Clock:
        """The place of each row in its document."""
        return self.cache.clock


class SparseAttention(nn.Module):
    """Output y = W (g_1 o_pooled + g_2 o_chosen + g_3 o_window), with gates g = sigmoid(x W_g) per head.

    o_pooled attends to the means of complete blocks. o_chosen attends to the tokens of the `top_k` blocks to which
    o_pooled gives the largest shares, o_window to the last `window` tokens. Scores of pooled blocks cost T^2 / block. A
    predictor's shares take their place if there is one; its loss is `imitate`'s, the mean over sampled queries. The
    metric "kept" is the share of dense attention that falls on chosen blocks and window, for a sample of queries.
    """

    config: SparseAttentionConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: SparseState | None = None,
    ) -> tuple[Float[Array, "B T D"], SparseState | None]:
        """Return the output and the state after the tokens (None in training)."""
        config = self.config
        check_kind(SparseState, state, block=config.block)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        times = self._times(rows)
        heads = {"q": config.num_heads, "k": config.groups, "v": config.groups}
        layers = [self._project(name, count, config.width) for name, count in heads.items()]
        q, k, v, gates = linears(rows.x, [*layers, self._project("gate", config.num_heads, 3)])
        gates = jax.nn.sigmoid(gates.astype(jnp.float32))
        places = times if positions is None else positions
        places = places if state is None else rows.arranged.positions
        q, k = turn(q, k, places, theta=config.rope_theta, scale=1.0)
        learned = None
        if config.predictor is not None:
            learned = self._learned(q, "predictor_q"), self._learned(k, "predictor_k")
        if state is None:
            branches = config.branches._replace(alone=rows.segment_ids is None)
            o = self._train(branches, rows, Stream(q, k, v, learned, gates, self._ids(rows), times))
        else:
            met = meet(k, v, rows.arranged, state.cache, split=False)
            documents = jnp.where(rows.arranged.live, rows.arranged.run + 1, 0)
            given = (q, learned, gates, met, documents, state.sums)
            o, cache, sums = over_batch(lambda given, _: attend_cached(config.branches, *given), given)
            state = dataclasses.replace(
                state, cache=dataclasses.replace(state.cache, clock=rows.clock, **cache._asdict()), sums=sums
            )
        names = ("heads", "head_dim", "embed")
        out = Linear("bthk,hkd->btd", {"d": config.dim}, names, self.dtype, name="out")
        return rows.restore(out(o.astype(self.dtype))), state

    def _times(self, rows: Rows) -> Int[Array, "B T"]:
        if rows.tokens is not None:
            return rows.tokens.time
        if rows.segment_ids is not None:
            return document_times(rows.segment_ids, rows.axis)
        size, length = rows.x.shape[:2]
        if rows.axis is not None:
            return row_times(size, length, rows.axis)
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (size, length))

    def _ids(self, rows: Rows) -> Int[Array, "B T"]:
        return jnp.ones(rows.x.shape[:2], jnp.int32) if rows.segment_ids is None else rows.segment_ids

    def _learned(self, x: Float[Array, "B T H K"], name: str) -> Float[Array, "B T H K"]:
        """Return x + V relu(W x) for queries or keys, of which no gradient reaches the layer; V begins small."""
        wide, x = {"p": self.config.predictor or 0}, lax.stop_gradient(x)
        hidden = Linear("bthk,kp->bthp", wide, ("head_dim", None), self.dtype, name=f"{name}_in")(x)
        start = {"kernel_init": nn.initializers.normal(0.01), "name": f"{name}_out"}
        out = Linear("bthp,pk->bthk", {"k": x.shape[-1]}, (None, "head_dim"), self.dtype, **start)
        return x + out(jax.nn.relu(hidden))

    def _train(self, branches: Branches, rows: Rows, stream: Stream) -> Float[Array, "B T H K"]:
        """Return the gated outputs; report chosen blocks and the share that they keep."""
        given = (stream, given_choice(self, CHOICE))
        heads = Stream(True, True, True, True, True, False, False), True
        learns = stream.learned is not None and self.is_mutable_collection("losses")
        work = partial(attend_tokens, branches, rows.axis, learns)
        if rows.axis is not None:
            o, lists, losses = over_sequence(work, given, heads=heads)
        else:
            o, lists, losses = over_batch(lambda given, _: work(given, (), ()), given, heads=heads)
        if losses is not None:
            away, weight = jnp.sum(losses, (0, 1, 2))
            sow_loss(self, "predictor", away / jnp.maximum(weight, 1))
        lists = held(self, CHOICE, lists)
        if rows.axis is None and self.is_mutable_collection("metrics"):
            share = partial(kept_share, branches)
            sow_metric(self, "kept", jnp.mean(over_batch(lambda given, _: share(*given), (stream, lists))))
        return o

    def _project(self, name: str, heads: int, width: int) -> Linear:
        axis = "heads" if name in ("q", "gate") else "kv_heads"
        return Linear(
            "btd,dhk->bthk",
            {"h": heads, "k": width},
            ("embed", axis, "head_dim"),
            self.dtype,
            name=name,
        )
