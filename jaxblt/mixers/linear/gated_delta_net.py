"""Gated DeltaNet: a matrix per head that replaces what it holds at a key, and forgets by a gate."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.linear.matrix_state import (
    Decay,
    HeadShape,
    MatrixState,
    Readout,
    Streams,
    check_heads,
    head_shape,
)
from pallas_kernels.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_adjoint,
    gated_delta_rule_summary,
)

EPSILON = 1e-6
"""Added to the square of a length: of a key of zero, which holes have, the gradient stays finite."""


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, read by o_t = S_t^T q_t (Yang et al., 2412.06464).

    Attributes:
      dim: width D.
      num_heads: heads of values H.
      num_key_heads: heads of queries and keys, a divisor of H; None for H.
      head_dim: width K of a query or key; None for D / H. A head can store about K pairs of key and value.
      value_head_dim: width V of a value; None for K. The paper takes 2 K.
      short_taps: taps of the short convolutions of q, k and v.
      allow_negative_eigenvalues: let b be in 0..2 instead of 0..1, so that a token can flip the state's sign at its
        key. Some state tracking, such as parity, needs this (Grazzi et al., 2411.12537).
      gated: False sets a_t = 1, so that a state changes only where a key replaces it: DeltaNet (2406.06484). Tracking
        over rows longer than in training needs this.
      causal: True; the rule has no bidirectional form.
      chunk_size: number of steps that are computed at once, a power of two; the result does not depend on it.
    """

    dim: int
    num_heads: int = 8
    num_key_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    short_taps: int = 4
    allow_negative_eigenvalues: bool = False
    gated: bool = True
    causal: bool = True
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_heads(self)

    @property
    def shape(self) -> HeadShape:
        """Heads and widths."""
        return head_shape(self)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "GatedDeltaNet":
        """Build the module.

        Parameters are fp32, products in `dtype`, norms, gates and the state in fp32.
        """
        return GatedDeltaNet(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> MatrixState:
        """Return zero inputs and S = 0."""
        return self.shape.init_state(batch_size, dtype, "GatedDeltaNet")


class GatedDeltaNet(nn.Module):
    """y = (RMSNorm(o) * silu(x W_g)) W_out with o of the gated delta rule.

    q and k have length 1, and o has no factor: what was written at a key is read back in its size. a = exp(-A dt) is
    that of `Decay` if it is gated, b = sigmoid(x W_b), times 2 for negative eigenvalues. It starts so
    that pairs are learned soon (`recall` of `Streams`).
    """

    config: GatedDeltaNetConfig
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
        config, heads = self.config, self.config.num_heads
        check_kind(MatrixState, state, mixer="GatedDeltaNet")
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        (q, k, v), short = Streams(config.shape, self.dtype, recall=True, name="streams")(
            rows, None if state is None else state.short
        )
        log_gate = Decay(heads, self.dtype, name="decay")(rows.x)[0] if config.gated else None
        names = ("embed", "heads")
        beta = Linear("btd,dh->bth", {"h": heads}, names, self.dtype, accumulate=jnp.float32, name="beta")(
            rows.x
        )
        beta = jax.nn.sigmoid(beta.astype(jnp.float32)) * (2 if config.allow_negative_eigenvalues else 1)
        streams = (unit(q), unit(k), v, beta, log_gate)
        core = DeltaRule(config.chunk_size)
        o, memory = rows.run(core, streams, None if state is None else state.memory)
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, memory=memory)


@partial(jax.checkpoint, prevent_cse=False)
def unit(x: Float[Array, "B T J K"]) -> Float[Array, "B T J K"]:
    """Scale x to length 1, computed in fp32; zero stays zero.

    The backward pass keeps x in its own dtype.
    """
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + EPSILON)).astype(x.dtype)


Reads = tuple[Float[Array, "B H K K"], Float[Array, "B T H K"]]
"""The transition of a stretch, and what its outputs read of a state that enters."""


@flax.struct.dataclass
class DeltaRule:
    """Core of the gated delta rule; streams are q, k, v, beta and log_gate, the carry is S, in fp32."""

    chunk_size: int = flax.struct.field(pytree_node=False)

    def zero(self, streams: Any) -> Float[Array, "B H K V"]:
        """Return S before the first token."""
        _, k, v, _, _ = streams
        return jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return the counts of keys and of values."""
        return streams[1].shape[2], streams[2].shape[2]

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B H K V"] | None
    ) -> tuple[Float[Array, "B T H V"], tuple[None, Float[Array, "B H K V"]] | None]:
        """Return outputs; with a carry also S behind the stretch."""
        *rows, log_gate = streams
        found: Any = gated_delta_rule(
            *rows,
            log_gate=log_gate,
            segment_ids=marks.segment_ids,
            initial_state=carry,
            output_final_state=carry is not None,
            scale=1.0,
            chunk_size=self.chunk_size,
        )
        return (found, None) if carry is None else (found[0], (None, found[1]))

    def observe(
        self, streams: Any, marks: Marks
    ) -> tuple[tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]], Reads]:
        """Return what the stretch multiplies S by, what it adds, and what it reads, for `adjoint`."""
        *rows, log_gate = streams
        options = {"log_gate": log_gate, "segment_ids": marks.segment_ids, "chunk_size": self.chunk_size}
        transition, left, reads = gated_delta_rule_summary(*rows, **options, scale=1.0)
        return (transition, left), (transition, reads)

    def adjoint(
        self, streams: Any, marks: Marks, seen: Reads, do: Float[Array, "B T H V"]
    ) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
        """Return what the stretch does to the gradient by S behind it, joined as summaries are."""
        return gated_delta_rule_adjoint(*seen, do, segment_ids=marks.segment_ids)

    def join(
        self, carry: Float[Array, "B H K V"], summary: tuple[Float[Array, "B H K K"] | None, Array]
    ) -> Float[Array, "B H K V"]:
        """Return S behind the stretch."""
        transition, left = summary
        if transition is None:
            return left
        return jnp.einsum("bhij,bhjv->bhiv", transition, carry, precision=jax.lax.Precision.HIGHEST) + left
