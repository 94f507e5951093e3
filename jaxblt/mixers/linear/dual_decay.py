"""Linear attention with a normaliser, whose heads each remember on two time scales."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, linears, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.linear.gated_linear_attention import LinearState
from jaxblt.mixers.linear.matrix_state import check_forward
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields

DECAYS = (0.70, 0.97)
"""The shares of a step that the fast and slow memory keep before training: they halve in 2 and 23 steps."""
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class DualDecayConfig:
    """o_t = sum_j g^(t-j) (p(q_t) . p(k_j)) v_j / sum_j g^(t-j) (p(q_t) . p(k_j)), p = elu + 1, for two decays g.

    Linear attention (Katharopoulos et al., 2006.16236, eq. 9) with decays that are learned, but do not depend on the
    input.

    Attributes:
      dim: width D.
      num_heads: heads H, a divisor of D; each has a memory with a fast decay and one with a slow decay.
      causal: True; the rule has no bidirectional form.
      chunk_size: number of steps that are computed at once, a power of two; the result does not depend on it.
    """

    dim: int
    num_heads: int = 8
    causal: bool = True
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "num_heads", "chunk_size", least=1)
        check_forward(self)
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} does not divide among num_heads = {self.num_heads}: change one")

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "DualDecay":
        """Build the module.

        Parameters are fp32, products in `dtype`, decays, normalisers and the state in fp32.
        """
        return DualDecay(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "DualDecayState":
        """Return empty memories."""
        width = self.dim // self.num_heads
        shape = (batch_size, 2 * self.num_heads, width, width + 1)
        return DualDecayState(start_clock(batch_size), jnp.zeros(shape, jnp.float32))


@flax.struct.dataclass
class DualDecayState:
    """The clock of each row, and the memories in fp32: values and, last, the sum of keys that normalises them."""

    clock: Clock
    memory: Float[Array, "B H2 K V1"]

    __repr__ = show


class DualDecay(nn.Module):
    """y = [o_fast, o_slow] W_out."""

    config: DualDecayConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: DualDecayState | None = None,
    ) -> tuple[Float[Array, "B T D"], DualDecayState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config, sizes = (
            self.config,
            {"h": self.config.num_heads, "k": self.config.dim // self.config.num_heads},
        )
        check_kind(DualDecayState, state)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        names = ("embed", "heads", "head_dim")
        project = [Linear("btd,dhk->bthk", sizes, names, self.dtype, name=name) for name in "qkv"]
        q, k, v = linears(rows.x, project)
        # Repeat queries and keys: the two memories of a head are neighbouring heads of values that share them.
        v = jnp.repeat(jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1), 2, axis=2)
        log_gate = jnp.broadcast_to(self._log_decay()[None, None], v.shape[:3])
        streams = (jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v, log_gate)
        core = LinearState("head", config.chunk_size)
        o, memory = rows.run(core, streams, None if state is None else state.memory)
        o = o.astype(jnp.float32)
        o = (o[..., :-1] / (o[..., -1:] + EPSILON)).astype(self.dtype)
        out = Linear(
            "bthk,hkd->btd", {"d": config.dim}, ("heads", "head_dim", "embed"), self.dtype, name="out"
        )
        y = rows.restore(out(o))
        return y, None if state is None else dataclasses.replace(state, clock=rows.clock, memory=memory)

    def _log_decay(self) -> Float[Array, "H2"]:
        """Return log decays: the first head's fast memory and its slow one, then the second head's."""
        logits = np.tile(np.log(DECAYS) - np.log1p(-np.asarray(DECAYS)), self.config.num_heads)
        init = named(lambda key, shape: jnp.asarray(logits, jnp.float32), "heads")
        return jax.nn.log_sigmoid(self.param("decay", init, logits.shape))
