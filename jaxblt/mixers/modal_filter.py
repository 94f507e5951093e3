"""Convolution with a modal filter: parameters, parallel pass, streaming."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Tokens, named, rows
from jaxblt.mixers.conv_state import continuing, op_segments
from jaxblt.mixers.filters import ModalFilter
from jaxblt.parallel.islands import over_batch
from pallas_kernels.modal_conv import modal_conv


class ModalConv(nn.Module):
    """y = post_gate * (h * u + b u), u = pre_gate * v, with h a sum of decaying exponentials.

    Rates are parameters as log(1/tau), so every mode decays whatever the optimiser does. Residues start with
    a variance that gives white input an output of its own size.
    """

    filter: ModalFilter
    dim: int
    causal: bool = True
    segment_alignment: int = 1
    implementation: Any = None

    def setup(self) -> None:
        shape = (1 if self.causal else 2, self.dim, self.filter.modes)
        axes = (None, "channels", "modes")
        self.log_rate = self.param("log_rate", named(self._init_rates, *axes), shape)
        self.residues = self.param("residues", named(self._init_residues, *axes), shape)
        normal = named(nn.initializers.normal(1.0), "channels")
        self.bias = self.param("bias", normal, (self.dim,))

    def _rates(self) -> np.ndarray:
        """1 / tau of each mode before training, fastest first."""
        fast, slow = np.log(1 / self.filter.min_timescale), np.log(1 / self.filter.max_timescale)
        return np.exp(np.linspace(fast, slow, self.filter.modes))

    def _init_rates(self, key: Array, shape: tuple[int, ...]) -> Float[Array, "S D M"]:
        return jnp.broadcast_to(jnp.asarray(np.log(self._rates()), jnp.float32), shape)

    def _init_residues(self, key: Array, shape: tuple[int, ...]) -> Float[Array, "S D M"]:
        energy = -np.expm1(-2 * self._rates()) / self.filter.modes
        return (
            jax.random.normal(key, shape, jnp.float32) * jnp.asarray(np.sqrt(energy), jnp.float32)[None, None]
        )

    def __call__(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B D T"]:
        """The parallel pass; inputs are zero at holes and padding."""
        log_poles = -jnp.exp(self.log_rate)
        shared = (log_poles[0], self.residues[0], self.bias)
        y = over_batch(self._forward, (v, pre_gate, post_gate, segment_ids), shared)
        if self.causal:
            return y
        backward = over_batch(
            self._backward, (v, pre_gate, post_gate, segment_ids), (log_poles[1], self.residues[1])
        )
        return y + backward

    def _forward(self, batched: Any, shared: Any, *, segment_alignment: int | None = None) -> Any:
        v, pre_gate, post_gate, segment_ids = batched
        log_poles, residues, bias = shared
        return modal_conv(
            v,
            log_poles,
            residues,
            segment_ids=segment_ids,
            segment_alignment=self.segment_alignment if segment_alignment is None else segment_alignment,
            bias=bias,
            pre_gate=pre_gate,
            post_gate=post_gate,
            implementation=self.implementation,
        )

    def _backward(self, batched: Any, shared: Any) -> Float[Array, "B D T"]:
        """The other side of the filter: the same op over the reversed row, where documents start anywhere."""
        reverse = jax.tree.map(lambda x: jnp.flip(x, -1), batched)
        return jnp.flip(self._forward(reverse, (*shared, None), segment_alignment=1), -1)

    def stream(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        tokens: Tokens,
        state: Float[Array, "B D M"],
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
        """Outputs of the call's tokens, and s_m = sum_r exp(-(t - r)/tau_m) u_r after the last of them."""
        shared = (-jnp.exp(self.log_rate[0]), self.residues[0], self.bias)
        step = _one_token if v.shape[-1] == 1 else self._chunk
        y, state = over_batch(step, (pre_gate * v, tokens, state), shared)
        return y if post_gate is None else post_gate * y, state

    def _chunk(self, batched: Any, shared: Any) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
        u, tokens, state = batched
        log_poles, residues, bias = shared
        kept = rows(continuing(tokens), state)
        y, after = modal_conv(
            u,
            log_poles,
            residues,
            segment_ids=op_segments(tokens),
            bias=bias,
            initial_state=jnp.where(kept, state, jnp.zeros((), state.dtype)),
            output_final_state=True,
            implementation=self.implementation,
        )
        return y, jnp.where(rows(jnp.any(tokens.live, 1), state), after, state)


def _one_token(batched: Any, shared: Any) -> tuple[Float[Array, "B D 1"], Float[Array, "B D M"]]:
    """s <- exp(-1/tau) s + u; y = sum_m r_m s_m + b u."""
    u, tokens, state = batched
    log_poles, residues, bias = shared
    x = u[..., 0].astype(jnp.float32)
    carried = jnp.where(
        rows(continuing(tokens), state), jnp.exp(log_poles)[None] * state, jnp.zeros((), state.dtype)
    )
    after = carried + x[..., None]
    y = jnp.sum(residues[None] * after, -1) + bias[None] * x
    return y[..., None].astype(u.dtype), jnp.where(rows(tokens.live[:, 0], state), after, state)
