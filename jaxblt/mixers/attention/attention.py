"""Attention as a sequence mixer: grouped queries, rotary or ALiBi positions, full or sliding window, KV cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, OpenSum, RMSNorm, linears, token_products
from jaxblt.mixers.attention.cached import attend_cached
from jaxblt.mixers.attention.kv_cache import AttentionState, check_ring, init_attention_state, meet
from jaxblt.mixers.attention.rotary import alibi_slopes, rotary_frequencies, turn
from jaxblt.mixers.attention.weights import weights_of_keys
from jaxblt.mixers.driver.base import last_run
from jaxblt.mixers.driver.recording import keep_tables
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.parallel.attention.by_time import rule_times
from jaxblt.parallel.attention.context import attend_rows
from jaxblt.parallel.attention.plan import Asked, Call, ContextParallel, Implementation, Plan, plan_call
from jaxblt.parallel.content import content_first
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.validation import check_bounds, check_fields, check_read
from pallas_kernels.attention import token_attention, writes_token
from pallas_kernels.attention.rules import Rule, is_static


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention (Vaswani et al., 1706.03762) with grouped queries (2305.13245).

    Attributes:
      dim: width D.
      num_heads: query heads H.
      num_kv_heads: key and value heads G, a divisor of H; None for H.
      head_dim: width K of a head; None for D / H.
      causal: whether a token sees only itself and earlier tokens; otherwise it sees its whole document.
      window: number of steps that a token sees, its own included (on either side if not causal); None for all.
      rule: a further condition on the keys that a token sees, by their times in the document, such as
        `pallas_kernels.attention.presets.bigbird()`. Empty blocks are not computed. None for no rule.
      position: rotary phases, ALiBi's distance penalty, or nothing.
      rope_theta: base of the rotary frequencies.
      rope_scale: factor that slows the rotary frequencies, to read contexts this much longer than in training.
      out_bias: add a bias to the output projection.
      packed: whether rows may hold several documents. False promises one per row (holes and padding at the end are
        allowed), so that the fastest kernels can run. Then pass no segment ids for causal rows without holes.
      implementation: name of an implementation of attention, or None for the fastest that can run.
      context_parallel: how devices exchange keys if a mesh splits rows along `seq`: a mode of
        `jaxblt.parallel.context_attention`, or None for its default.
      layout: order of tokens over those devices, without a state (see `jaxblt.parallel.SequenceLayout`). "zigzag" saves
        swaps in a causal ring. The host orders whole rows, so no other layer may depend on the order.
    """

    dim: int
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    window: int | None = None
    rule: Rule | None = None
    position: Literal["rope", "alibi", "none"] = "rope"
    rope_theta: float = 10_000.0
    rope_scale: float = 1.0
    out_bias: bool = False
    packed: bool = True
    implementation: Implementation = None
    context_parallel: ContextParallel | None = None
    layout: Literal["contiguous", "zigzag"] = "contiguous"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "num_heads", "num_kv_heads", "head_dim", least=1)
        check_bounds(self, "window", least=1, why=" step, the token itself; None sees all")
        check_bounds(self, "rope_theta", "rope_scale", above=0)
        for name in ("rope_theta", "rope_scale"):
            check_read(self, name, needed="position='rope'", is_read=self.position == "rope")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not divide among num_heads = {self.num_heads}: set head_dim"
            )
        if self.num_heads % self.groups:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.groups}")
        self._check_rule()
        by_ring = self.window is None and self.position != "alibi" and self.context_parallel in (None, "ring")
        if SequenceLayout(self.layout) != CONTIGUOUS and not by_ring:
            raise ValueError(
                f"the {self.layout} layout is for rings, without window and ALiBi: got window={self.window}, "
                f"position={self.position!r}, context_parallel={self.context_parallel!r}; use layout='contiguous'"
            )
        if self.position == "rope" and self.width % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels: head_dim must be even, got {self.width}"
            )
        if self.position == "alibi" and not self.causal:
            raise ValueError("ALiBi penalises distance into the past: use position='rope' when causal=False")

    def _check_rule(self) -> None:
        """Raise ValueError for a rule that this layer cannot keep, naming the fix."""
        if self.rule is None:
            return
        if not is_static(self.rule):
            raise ValueError(
                f"AttentionConfig.rule holds arrays, got a {type(self.rule).__name__}: pass lists to the op "
                "`attention`, or let SparseAttentionConfig choose blocks"
            )
        if self.causal and self.rule.looks_ahead:
            raise ValueError(
                f"{self.rule!r} shows later keys and causal=True hides them: set causal=False, or leave PrefixLM out"
            )
        if self.context_parallel is not None or SequenceLayout(self.layout) != CONTIGUOUS:
            raise ValueError(
                f"a rule goes round a ring by times: got context_parallel={self.context_parallel!r} and "
                f"layout={self.layout!r}; leave them None and 'contiguous'"
            )

    @property
    def takes_norm(self) -> bool:
        """True if the module's call takes a norm, of a block that decodes a token; a subclass may build another."""
        return type(self) is AttentionConfig and not self.out_bias

    @property
    def groups(self) -> int:
        """Key and value heads G."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Width K of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def asked(self) -> Asked:
        """Everything that a call's plan wants to know of the config."""
        return Asked(
            heads=self.num_heads,
            groups=self.groups,
            width=self.width,
            causal=self.causal,
            window=self.window,
            rule=self.rule,
            alibi=self.position == "alibi",
            packed=self.packed,
            layout=SequenceLayout(self.layout),
            mode=self.context_parallel,
            implementation=self.implementation,
        )

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Attention":
        """Return the module; parameters are fp32, computation in `dtype`, softmax in fp32."""
        return Attention(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> AttentionState:
        """Return an empty cache of `capacity` slots, or of `window` slots if that is fewer.

        `capacity` slots are rounded up to an even number. Under a mesh that splits the sequence, they are rounded up to
        a multiple of its devices and lie on them in equal runs.
        """
        return init_attention_state(
            batch_size,
            num_kv_heads=self.groups,
            head_dim=self.width,
            capacity=capacity,
            window=self.window,
            dtype=dtype,
        )


class Attention(nn.Module):
    """Attention o = softmax(q k^T / sqrt(K) + mask) v, per head; see `AttentionConfig`.

    In training the cost is that of the op. A row with holes is sorted to put them last, unless the mask goes by time
    (window, ALiBi). With a state the call's tokens see the cache and each other, and on a GPU there may be no
    derivative.
    """

    config: AttentionConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | OpenSum,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Float[Array, "B T D"] | OpenSum, AttentionState | None]:
        """Return the output and the state after the tokens (None in training).

        With a norm the output is x + attention(norm(x)) of one token, zero if it is no content: see `token_products`.
        """
        config = self.config
        token: Any = x
        x = x.x if isinstance(x, OpenSum) else x
        check_kind(AttentionState, state)
        clock = None if state is None else state.clock
        check_ring(state, config.window)
        alone = not config.packed
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim, alone=alone)
        call = Call(
            config.asked,
            rows=x.shape[0],
            tokens=x.shape[1],
            dtype=self.dtype,
            has_ids=rows.segment_ids is not None,
            axis=rows.axis,
            split=rows.split,
            cache=None if state is None else state.shape,
        )
        plan = plan_call(call)
        if norm is not None and state is not None and self._writes_in_place(plan, state):
            return self._decode(token, norm, rows, state)
        if state is not None:
            positions = rows.arranged.positions
        elif positions is None:
            positions = config.asked.layout.places(x.shape[1], plan.axis)[None]
        x, content = rows.x, None
        hides = None if rows.segment_ids is None else jnp.maximum(rows.segment_ids, 0)
        if plan.sorts_rows and hides is not None:
            content = content_first(hides)
            x, hides = content.sort(x), content.lengths
            positions = jnp.take_along_axis(positions, content.order, 1)
        if norm is None:
            q, k, v = self._heads(linears(x, self._projections()), positions)
        else:
            token, joined = token_products(token, self._projections(), norm)
            q, k, v = self._heads(self._split(joined), positions)
        if state is None:
            given = (hides, self._slopes, rule_times(call, plan, segment_ids))
            attend = lambda v: self.attend(plan, q, k, v, given)  # noqa: E731
            keep_tables(self, "attention", lambda: {"weights": weights_of_keys(attend, v)})
            y = self._out(attend(v))
            return y if content is None else content.restore(y), None
        met = meet(k, v, rows.arranged, state, split=rows.split)
        o, cache = attend_cached(plan, q, met, self._slopes)
        state = dataclasses.replace(state, clock=rows.clock, **cache._asdict())
        if norm is not None:
            o = jnp.where(rows.arranged.content[..., None, None], o, jnp.zeros((), o.dtype))
            return OpenSum(token, token_products(o, [self._projection()])[1]), state
        return rows.restore(self._out(o)), state

    def attend(
        self,
        plan: Plan,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        given: tuple[Any, Any, Any],
    ) -> Float[Array, "B T H K"]:
        """Return attention of a call without a state; `given` is what hides keys, slopes and times (`attend_rows`).

        A step in precision "fp8" may run it in FP8 (`jaxblt.precision.sites`).
        """
        return attend_rows(plan, q, k, v, *given)

    def _writes_in_place(self, plan: Plan, state: AttentionState) -> bool:
        """Return whether one kernel writes a token to the cache and attends."""
        q = jax.ShapeDtypeStruct((1, 1, self.config.num_heads, self.config.width), self.dtype)
        return plan.cache == "prefix" and writes_token(q, state.k)

    def _decode(
        self, x: Float[Array, "1 1 D"] | OpenSum, norm: RMSNorm, rows: Rows, state: AttentionState
    ) -> tuple[OpenSum, AttentionState]:
        """Return one token's output and the state: the token is written and read in one launch."""
        config, tokens = self.config, rows.arranged
        token, heads = token_products(x, self._projections(), norm)
        fresh = jnp.broadcast_to(last_run(tokens)[:, None] > 0, tokens.content.shape)
        marks = jnp.concatenate([tokens.positions, tokens.time, tokens.content, fresh], 1, dtype=jnp.int32)
        turns = None
        if config.position == "rope":
            turns = jnp.asarray(
                rotary_frequencies(config.width, theta=config.rope_theta, scale=config.rope_scale)
            )
        window = config.window if state.capacity is None else None
        cache, options = (state.k, state.v, state.times), {"dtype": self.dtype, "window": window}
        found = token_attention(heads[:, None], *cache, marks, turns, **options)
        parts, lse = found.o.reshape(len(found.o), -1), found.lse[:, 0]
        y = token_products(None, [self._projection()], parts=parts, lse=lse)[1]
        after = {"clock": rows.clock, "k": found.k, "v": found.v, "times": found.times}
        return OpenSum(token, y), dataclasses.replace(state, **after)

    def _split(self, parts: Float[Array, "P N"]) -> list[Float[Array, "1 1 _ K"]]:
        """Return queries, keys and values of one token, from the parts of their products."""
        joined, config = jnp.sum(parts, 0).astype(self.dtype), self.config
        ends = config.num_heads, config.num_heads + config.groups
        return jnp.split(joined.reshape(1, 1, ends[1] + config.groups, -1), ends, 2)

    def _heads(
        self, products: Sequence[Float[Array, "B T _ K"]], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
        """Return queries, keys and values, position encoding applied."""
        config, (q, k, v) = self.config, products
        if config.position == "rope":
            q, k = turn(q, k, positions, theta=config.rope_theta, scale=config.rope_scale)
        return q, k, v

    def _projections(self) -> list[Linear]:
        config = self.config
        heads = {"q": config.num_heads, "k": config.groups, "v": config.groups}
        return [self._project(name, count) for name, count in heads.items()]

    def _project(self, name: str, heads: int) -> Linear:
        axis = "heads" if name == "q" else "kv_heads"
        sizes = {"h": heads, "k": self.config.width}
        return Linear("btd,dhk->bthk", sizes, ("embed", axis, "head_dim"), self.dtype, name=name)

    def _out(self, o: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        return self._projection()(o)

    def _projection(self) -> Linear:
        names, bias = ("heads", "head_dim", "embed"), nn.initializers.zeros if self.config.out_bias else None
        return Linear("bthk,hkd->btd", {"d": self.config.dim}, names, self.dtype, bias=bias, name="out")

    @property
    def _slopes(self) -> Float[Array, "H"] | None:
        return jnp.asarray(alibi_slopes(self.config.num_heads)) if self.config.position == "alibi" else None
