"""Attention as a sequence mixer: grouped queries, rotary or ALiBi positions, full or sliding window, KV cache."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, linears
from jaxblt.mixers.attention.cached import Heads, Op, attend_cached
from jaxblt.mixers.attention.kv_cache import AttentionState, check_ring, init_attention_state
from jaxblt.mixers.attention.rotary import alibi_slopes, rotary_angles, rotary_frequencies, rotate
from jaxblt.mixers.driver.base import blank, content_of
from jaxblt.mixers.driver.sequence import check_call, check_kind, read
from jaxblt.parallel.attention.context import ContextParallel, Implementation, context_attention
from jaxblt.parallel.content import content_first
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.parallel.sequence import SeqAxis, seq_axis
from jaxblt.validation import check_bounds, check_fields, check_read
from pallas_kernels.attention import attention, masks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.runtime import check_documents


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention (Vaswani et al., 1706.03762) with grouped queries (2305.13245).

    Attributes:
      dim: width D.
      num_heads: query heads H.
      num_kv_heads: key and value heads G, a divisor of H; None for H.
      head_dim: width K of a head; None for D / H.
      causal: a token sees itself and what came before; otherwise its whole document.
      window: steps that a token sees, its own included (on either side if not causal); None for all.
      position: rotary phases, ALiBi's distance penalty, or nothing.
      rope_theta: base of the rotary frequencies.
      rope_scale: slows the rotary frequencies, to read contexts this much longer than those trained on.
      out_bias: the output projection has a bias.
      packed: rows may hold several documents. False promises one a row (holes and tail padding allowed),
        which lets the fastest kernels run; for causal rows without holes pass no segment ids at all then.
      implementation: of the attention op; None for the fastest that runs.
      context_parallel: how tokens that a mesh splits along `seq` reach each other, as the modes of
        `jaxblt.parallel.context_attention`; None for what is stated there.
      layout: in which order they come then (see `jaxblt.parallel.SequenceLayout`), where there is no state. "zigzag"
        spares a causal ring its swaps; the host lays out whole rows, so that no layer may care for the order.
    """

    dim: int
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = True
    window: int | None = None
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

    @property
    def groups(self) -> int:
        """Key and value heads G."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width(self) -> int:
        """Width K of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Attention":
        """The module; parameters are fp32, computation in `dtype`, softmax in fp32."""
        return Attention(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> AttentionState:
        """An empty cache of `capacity` slots, or of `window` slots if that is fewer.

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
    """o = softmax(q k^T / sqrt(K) + mask) v, per head; see `AttentionConfig`.

    In training the cost is that of the op; a row with holes is sorted to put them last unless the mask goes
    by time (window, ALiBi). With a state the call's tokens see the cache and each other, and on a GPU there may be no
    derivative.
    """

    config: AttentionConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: AttentionState | None = None,
    ) -> tuple[Float[Array, "B T D"], AttentionState | None]:
        """Output and the state after the tokens (None in training)."""
        config = self.config
        check_kind(AttentionState, state)
        clock = None if state is None else state.clock
        check_call(x, segment_ids, positions, clock, width=config.dim)
        sizes = {"q": config.num_heads, "k": config.groups, "v": config.groups}
        project = [self._project(name, heads) for name, heads in sizes.items()]
        names = ("heads", "head_dim", "embed")
        bias = nn.initializers.zeros if config.out_bias else None
        out = Linear("bthk,hkd->btd", {"d": config.dim}, names, self.dtype, bias=bias, name="out")
        x = x.astype(self.dtype)
        if state is not None:
            check_ring(state, config.window)
            rows = read(x, segment_ids, positions, state.clock)
            tokens = rows.arranged
            heads = self._turn(linears(rows.x, project), tokens.positions)
            op = Op(config.window, config.implementation)
            o, state = attend_cached(op, heads, tokens, state, self._slopes, split=rows.split)
            return rows.restore(out(o)), dataclasses.replace(state, clock=rows.clock)
        check_documents(segment_ids, 1 if config.packed else None)
        x = blank(x, content_of(segment_ids))
        axis = seq_axis(x)
        if positions is None:
            positions = self._places(x.shape[1], axis)[None]
        if axis is not None:
            q, k, v = self._turn(linears(x, project), positions)
            return out(self._split(q, k, v, segment_ids)), None
        if segment_ids is None or config.packed or self._by_time:
            q, k, v = self._turn(linears(x, project), positions)
            return out(self._over_heads(self._segmented, (q, k, v, segment_ids))), None
        content = content_first(segment_ids)
        positions = jnp.take_along_axis(positions, content.order, 1)
        x = content.sort(x)
        q, k, v = self._turn(linears(x, project), positions)
        o = self._over_heads(self._prefix, (q, k, v, content.lengths))
        return content.restore(out(o)), None

    def _project(self, name: str, heads: int) -> Linear:
        axis = "heads" if name == "q" else "kv_heads"
        sizes = {"h": heads, "k": self.config.width}
        return Linear("btd,dhk->bthk", sizes, ("embed", axis, "head_dim"), self.dtype, name=name)

    def _turn(self, heads: list[Array], positions: Int[Array, "#B T"]) -> Heads:
        config, (q, k, v) = self.config, heads
        if config.position != "rope":
            return q, k, v
        frequencies = rotary_frequencies(config.width, theta=config.rope_theta, scale=config.rope_scale)
        angles = rotary_angles(positions, frequencies)
        return rotate(q, angles), rotate(k, angles), v

    def _places(self, length: int, axis: SeqAxis | None) -> Int[Array, "T"]:
        """Each token's place in its row."""
        if axis is None:
            return jnp.arange(length, dtype=jnp.int32)
        order = jnp.asarray(self._layout.order(axis.whole(length), axis.size), jnp.int32)
        return order.reshape(axis.size, -1)[jax.lax.axis_index(axis.name)] if axis.manual else order

    @property
    def _layout(self) -> SequenceLayout:
        return SequenceLayout(self.config.layout)

    @property
    def _by_time(self) -> bool:
        return self.config.window is not None or self.config.position == "alibi"

    @property
    def _slopes(self) -> Float[Array, "H"] | None:
        return jnp.asarray(alibi_slopes(self.config.num_heads)) if self.config.position == "alibi" else None

    def _over_heads(self, fn: Callable[[Any, Any], Array], batched: Any) -> Float[Array, "B T H K"]:
        return over_batch(fn, batched, self._slopes, heads=(True, True, True, False))

    def _segmented(self, batched: Any, slopes: Array | None) -> Float[Array, "B T H K"]:
        q, k, v, segment_ids = batched
        ids = None if segment_ids is None else jnp.maximum(segment_ids, 0)
        return self._attend(q, k, v, masks.documents(ids), slopes)

    def _split(self, q: Array, k: Array, v: Array, segment_ids: Array | None) -> Float[Array, "B T H K"]:
        ids = None if segment_ids is None else jnp.maximum(segment_ids, 0)
        config = self.config
        return context_attention(
            q,
            k,
            v,
            ids,
            causal=config.causal,
            window=config.window,
            alibi_slopes=self._slopes,
            packed=config.packed,
            mode=config.context_parallel,
            layout=self._layout,
            implementation=config.implementation,
        )

    def _prefix(self, batched: Any, slopes: Array | None) -> Float[Array, "B T H K"]:
        q, k, v, lengths = batched
        return self._attend(q, k, v, masks.token_lengths(lengths), slopes)

    def _attend(self, q: Array, k: Array, v: Array, rows: Mask, slopes: Array | None) -> Array:
        mask = rows & masks.band(self.config.causal, self.config.window)
        return attention(q, k, v, mask, alibi_slopes=slopes, implementation=self.config.implementation)
