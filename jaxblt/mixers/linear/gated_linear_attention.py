"""Gated linear attention: a matrix per head that forgets by a gate for each key channel."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, dense
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.linear.matrix_state import (
    HeadShape,
    MatrixState,
    Readout,
    Streams,
    check_heads,
    head_shape,
)
from jaxblt.validation import check_bounds
from pallas_kernels.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_adjoint,
    gated_linear_attention_summary,
)

SLOWED = 16.0
"""Divides the logarithm of a gate (tau of the paper, sec. 4.4), so that gates start near 1."""


@dataclasses.dataclass(frozen=True)
class GatedLinearAttentionConfig:
    """S_t = diag(a_t) S_{t-1} + k_t v_t^T, read by o_t = S_t^T q_t / sqrt(K) (Yang et al., 2312.06635).

    Attributes:
      dim: width D.
      num_heads: heads of values H.
      num_key_heads: heads of queries and keys, a divisor of H; None for H.
      head_dim: width K of a query or key; None for D / H.
      value_head_dim: width V of a value; None for K.
      gate_rank: rank of the product of two matrices that computes the gates.
      short_taps: taps of the short convolutions of q, k and v. The paper has none, but recall by keys needs them. At
        the start q and v take the token itself; k takes the token and the one before it with equal weight.
      causal: True; the rule has no bidirectional form.
      chunk_size: number of steps that are computed at once, a power of two; the result does not depend on it.
    """

    dim: int
    num_heads: int = 8
    num_key_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    gate_rank: int = 16
    short_taps: int = 4
    causal: bool = True
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_heads(self)
        check_bounds(self, "gate_rank", least=1)

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        return head_shape(self)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "GatedLinearAttention":
        """Build the module.

        Parameters are fp32, products in `dtype`, norms, gates and the state in fp32.
        """
        return GatedLinearAttention(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> MatrixState:
        """Return zero inputs and S = 0."""
        return self.shape.init_state(batch_size, dtype, "GatedLinearAttention")


class GatedLinearAttention(nn.Module):
    """y = (RMSNorm(o) * silu(x W_g)) W_out, with gates a = sigmoid(x W_1 W_2 + b)^(1/16)."""

    config: GatedLinearAttentionConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: MatrixState | None = None,
    ) -> tuple[Float[Array, "B T D"], MatrixState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config = self.config
        check_kind(MatrixState, state, mixer="GatedLinearAttention")
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        (q, k, v), short = Streams(config.shape, self.dtype, recall=True, name="streams")(
            rows, None if state is None else state.short
        )
        streams, core = (q, k, v, self._log_gate(rows.x)), LinearState("key", config.chunk_size)
        o, memory = rows.run(core, streams, None if state is None else state.memory)
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, memory=memory)

    def _log_gate(self, x: Float[Array, "B T D"]) -> Float[Array, "B T J K"]:
        shape, rank = self.config.shape, self.config.gate_rank
        low = dense(rank, axes=("embed", "features"), dtype=self.dtype, name="gate_in")(x)
        high = Linear(
            "btr,rjk->btjk",
            {"j": shape.key_heads, "k": shape.keys},
            ("features", "kv_heads", "head_dim"),
            self.dtype,
            bias=nn.initializers.zeros,
            accumulate=jnp.float32,
            name="gate_out",
        )(low)
        return jax.nn.log_sigmoid(high.astype(jnp.float32)) / SLOWED


@flax.struct.dataclass
class LinearState:
    """Core of S_t = a_t S_{t-1} + k_t v_t^T, o_t = scale S_t^T q_t; the carry is S, in fp32.

    Streams are q, k, v and log a: one number per key channel, or per head.
    """

    gate: str = flax.struct.field(pytree_node=False)
    """The owners of gates: "key" channels, or "head"s."""
    chunk_size: int = flax.struct.field(pytree_node=False)
    scale: float | None = flax.struct.field(pytree_node=False, default=None)

    def zero(self, streams: Any) -> Float[Array, "B H K V"]:
        """Return S before the first token."""
        _, k, v, _ = streams
        return jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return the counts of keys and of values."""
        return streams[1].shape[2], streams[2].shape[2]

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B H K V"] | None
    ) -> tuple[Float[Array, "B T H V"], tuple[None, Float[Array, "B H K V"]] | None]:
        """Return outputs; with a carry also S behind the stretch."""
        q, k, v, gate = streams
        options = {"segment_ids": marks.segment_ids, "scale": self.scale, "chunk_size": self.chunk_size}
        stored: Any = {"initial_state": carry, "output_final_state": carry is not None}
        found: Any = gated_linear_attention(q, k, v, **self._gate(gate), **options, **stored)
        return (found, None) if carry is None else (found[0], (None, found[1]))

    def observe(
        self, streams: Any, marks: Marks
    ) -> tuple[tuple[Float[Array, "B H #K 1"], Float[Array, "B H K V"]], None]:
        """Return what the stretch multiplies S by, elementwise, and what it adds.

        `adjoint` needs no more.
        """
        _, k, v, gate = streams
        return gated_linear_attention_summary(k, v, **self._gate(gate), segment_ids=marks.segment_ids), None

    def adjoint(
        self, streams: Any, marks: Marks, seen: None, do: Float[Array, "B T H V"]
    ) -> tuple[Float[Array, "B H #K 1"], Float[Array, "B H K V"]]:
        """Return what the stretch does to the gradient by S behind it, joined as summaries are."""
        q, _, _, gate = streams
        options: dict[str, Any] = {"segment_ids": marks.segment_ids, "scale": self.scale}
        return gated_linear_attention_adjoint(q, do, **self._gate(gate), **options)

    def join(
        self, carry: Float[Array, "B H K V"], summary: tuple[Float[Array, "B H #K 1"] | None, Array]
    ) -> Float[Array, "B H K V"]:
        """Return S behind the stretch."""
        decay, left = summary
        return left if decay is None else decay * carry + left

    def _gate(self, gate: Array) -> dict[str, Array]:
        return {"log_key_gate" if self.gate == "key" else "log_gate": gate}
